#!/bin/sh
# Runs slowhttptest (Debian: apt-get install slowhttptest) in its four modes against
# kvgate while a normal client asks once every 20 ms, and says how many of its
# requests were answered, how many connections were open at once, and what memory
# kvgate had before, at most, and after.
#
#   make build && bench/e2e/slow.sh ./kvgate [SECONDS] [CONNECTIONS]
#
# A mode has passed when every request of the normal client was answered; when at
# least half of the slow connections were open at once, or closed again by kvgate,
# so that there was something to withstand; and when memory stayed flat: it grew by
# no more than 96 kB per slow connection (a read buffer of 32 kB and two stacks, and as
# much again that the collector lets stand), by no more than a half in the second half
# of the time, and behind the mode it is within 16 MB of what it was at first.
# Exits 1 when a mode has failed, 2 when there is no slowhttptest.
set -eu
kvgate=$1 seconds=${2:-20} connections=${3:-1000}
command -v slowhttptest >/dev/null || { echo "slowhttptest is missing: apt-get install slowhttptest" >&2; exit 2; }
port=18480 admin=18490 replica=18470
dir=$(mktemp -d)
pids=
trap 'for p in $pids; do kill "$p" 2>/dev/null || :; done; rm -rf "$dir"' EXIT

"$kvgate" bench fakevllm --listen 127.0.0.1:$replica >"$dir/replica.log" 2>&1 & pids=$!
"$kvgate" serve --listen 127.0.0.1:$port --admin-listen 127.0.0.1:$admin --replica http://127.0.0.1:$replica \
	--server-header-timeout 5s --server-body-timeout 5s --server-write-timeout 5s --log-access=false >"$dir/gate.log" 2>&1 & gate=$!
pids="$pids $gate"
url=http://127.0.0.1:$port/v1/chat/completions
model=
for _ in 1 2 3 4 5 6 7 8 9 10; do
	model=$(curl -sf http://127.0.0.1:$port/v1/models | sed -n 's/.*"id":"\([^"]*\)".*/\1/p') && [ -n "$model" ] && break
	sleep 0.5
done
[ -n "$model" ] || { cat "$dir"/*.log >&2; exit 1; }
body='{"model":"'$model'","max_tokens":4,"messages":[{"role":"user","content":"hello"}]}'
open() { curl -s -m 5 http://127.0.0.1:$admin/metrics | sed -n 's/^kvgate_conns_open \([0-9]*\)$/\1/p'; }
rss() { sed -n 's/^VmRSS:[^0-9]*\([0-9]*\).*/\1/p' /proc/$gate/status; }

failed=0 first=$(rss)
verdict() { # MODE OK WHAT
	if [ "$2" = 1 ]; then echo "PASS $1 $3" >&2; else echo "FAIL $1 $3" >&2; failed=1; fi
}
echo "| Mode | Slow connections | open at once | Normal requests | Answered | RSS before, kB | at most | after |"
echo "|---|---|---|---|---|---|---|---|"
for mode in -H -B -X -R; do
	case $mode in
	-H) args="-i 1 -u $url" ;;
	-B) args="-i 1 -s 8192 -x 10 -t POST -f application/json -u $url" ;;
	-X) args="-n 1 -w 10 -y 20 -z 32 -k 3 -u http://127.0.0.1:$port/v1/models" ;;
	-R) args="-a 10 -b 3000 -t HEAD -u http://127.0.0.1:$port/v1/models" ;;
	esac
	before=$(rss) most=0 half=0 opened=0 asked=0 answered=0 middle=$(($(date +%s) + seconds / 2))
	# shellcheck disable=SC2086
	slowhttptest -c "$connections" -r 200 -l "$seconds" -p 5 $mode $args >"$dir/slow.log" 2>&1 & slow=$!
	pids="$pids $slow"
	while kill -0 "$slow" 2>/dev/null; do
		asked=$((asked + 1))
		status=$(curl -s -o /dev/null -m 10 -w '%{http_code}' -H 'Content-Type: application/json' -d "$body" "$url") || :
		if [ "$status" = 200 ]; then answered=$((answered + 1)); else echo "mode $mode: status $status" >&2; fi
		now=$(rss)
		[ "$now" -le "$most" ] || most=$now
		[ "$(date +%s)" -gt "$middle" ] || half=$most
		now=$(open)
		[ "${now:-0}" -le "$opened" ] || opened=$now
		sleep 0.02
	done
	wait "$slow" || :
	sleep 6
	after=$(rss)
	tr -d '\033' <"$dir/slow.log" | sed 's/\[[0-9;]*m//g' | grep -a -E 'closed:|service available|Exit status' | tail -3 >&2
	closed=$(tr -d '\033' <"$dir/slow.log" | sed 's/\[[0-9;]*m//g' | sed -n 's/^closed: *\([0-9]*\).*/\1/p' | tail -1)
	echo "| $mode | $connections | $opened | $asked | $answered | $before | $most | $after |"
	verdict "$mode" $((asked > 0 && asked == answered)) "normal requests answered: $answered of $asked"
	verdict "$mode" $((opened + ${closed:-0} >= connections / 2)) "slow connections: $opened open at once, ${closed:-0} closed in the end, of $connections"
	verdict "$mode" $((most <= before + 96 * connections && 2 * most <= 3 * half && after <= first + 16384)) \
		"memory: $before kB before, $half at most in the first half, $most in all, $after after; $first at first"
done
exit $failed
