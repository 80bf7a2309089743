-- For wrk: posts bench/chat.json (8 KB). Run it from the project's root.
local file = assert(io.open("bench/chat.json"))
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = file:read("*a")
file:close()
