#!/usr/bin/env python3
"""Injects faults into two running replicas behind kvgate and says, line by line,
whether what must hold does. Standard library only; Linux (processes are found in /proc).

    vllm serve MODEL --port 8102 ... & vllm serve MODEL --port 8103 ... &
    make build && python3 bench/e2e/faults.py ./kvgate http://127.0.0.1:8102 http://127.0.0.1:8103 \\
        --restart 'exec vllm serve MODEL --port {port} ...'

The parts, each of which starts a kvgate of its own:

    isolation   with isolation.mode key, one prompt of two API keys shares no cached block
                (the replicas' hit counters and kvgate's explain agree), of one key it does
    abort       a client that leaves while the head is due, in a stream, and in a plain
                answer frees the replica: vllm:num_requests_running is 0 within 2 s
    hang        a replica that is stopped amid its streams (SIGSTOP): the idle limit ends them
                with an error event, the next 10 requests succeed
    kill-api    kill -9 of one replica's server amid 16 streams: its streams end as errors
                and never with [DONE], the others finish, the next 50 requests succeed
    kill-engine kill -9 of one EngineCore: its error event is passed on and counted, the
                next 50 requests succeed
    term        SIGTERM of one replica whose streams may hang: each ends, by itself or by
                the idle limit with an error event; the next 50 requests succeed

The last three take a replica away. --restart is the command that brings it back: {port} and
{i} (0 or 1) are filled in; what the script has started it ends. Without it only the
first of them runs. Exits 1 when a line says FAIL.
"""
import argparse
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

CHAT = "/v1/chat/completions"
STREAMS = 16
IDLE = 5  # seconds: kvgate's stream_timeout, the idle limit of a stream


class Report:
    def __init__(self):
        self.failed = False

    def line(self, ok, what, detail=""):
        self.failed |= not ok
        print(f"{'PASS' if ok else 'FAIL'} {what}{': ' + str(detail) if detail != '' else ''}", flush=True)

    def skip(self, what):
        print(f"SKIP {what}", flush=True)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def fetch(url, timeout=10):
    with urllib.request.urlopen(url, timeout=timeout) as page:
        return page.read().decode()


def until(cond, seconds, pause=0.02):
    """Waits for a condition and returns the seconds it took, None when it did not come true."""
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        try:
            if cond():
                return time.monotonic() - begin
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(pause)
    return None


def series(page, name, labels=""):
    """The sum of a series over all label sets in which labels occurs."""
    total = 0.0
    for line in page.splitlines():
        m = re.match(r"([a-zA-Z_:]+)(\{.*\})?\s+(\S+)", line)
        if m and m[1] == name and labels in (m[2] or ""):
            total += float(m[3])
    return total


class Replica:
    """One replica: its URL, its process, and how to start it again."""

    def __init__(self, index, url, restart):
        self.index, self.url, self.restart = index, url.rstrip("/"), restart
        self.port = urllib.parse.urlsplit(url).port
        self.process = None  # when this script has started it

    def ready(self):
        return urllib.request.urlopen(self.url + "/health", timeout=2).status == 200

    def refuses(self):
        with socket.socket() as s:
            s.settimeout(2)
            return s.connect_ex(("127.0.0.1", self.port)) != 0

    def metric(self, *names):
        page = fetch(self.url + "/metrics")
        return sum(series(page, n) for n in names)

    def nudge(self, model):
        """Has the engine do one step."""
        urllib.request.urlopen(urllib.request.Request(self.url + CHAT, json.dumps(question(model, "step", 1)).encode(), {"Content-Type": "application/json"})).read()

    def running(self):
        return self.metric("vllm:num_requests_running", "vllm:num_requests_waiting")

    def hits(self):
        return self.metric("vllm:prefix_cache_hits_total")

    def pid(self):
        """The process that listens on the port."""
        inodes = set()
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with open(table) as lines:
                for line in list(lines)[1:]:
                    cells = line.split()
                    if cells[3] == "0A" and int(cells[1].rsplit(":", 1)[1], 16) == self.port:
                        inodes.add(f"socket:[{cells[9]}]")
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                for fd in os.listdir(f"/proc/{pid}/fd"):
                    if os.readlink(f"/proc/{pid}/fd/{fd}") in inodes:
                        return int(pid)
            except OSError:
                continue
        raise SystemExit(f"nobody listens on port {self.port}, or not as this user")

    def family(self):
        """The server's process and all beneath it."""
        parents = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat") as f:
                    parents.setdefault(int(f.read().rsplit(")", 1)[1].split()[1]), []).append(int(pid))
            except OSError:
                continue
        family = [self.pid()]
        for pid in family:
            family += parents.get(pid, [])
        return family

    def engine(self):
        """The EngineCore's process, None when there is none."""
        for pid in self.family()[1:]:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                if b"EngineCore" in f.read():
                    return pid
        return None

    def bring_back(self, family, last):
        """Ends what is left of the old processes and starts the replica again, unless it was the last part."""
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if self.process:
            self.process.wait()
        if last or not self.restart:
            return last
        command = self.restart.format(port=self.port, i=self.index)
        self.process = subprocess.Popen(["/bin/sh", "-c", command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if until(self.ready, 300, 0.5) is None:
            raise SystemExit(f"the replica on port {self.port} did not come back: {command}")
        return True

    def end(self):
        if self.process and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()


class Gate:
    """A kvgate in front of the replicas, with settings of its own."""

    def __init__(self, binary, replicas, settle, **settings):
        self.dir = tempfile.TemporaryDirectory()
        self.port, self.admin = free_port(), free_port()
        config = {
            "listen": f"127.0.0.1:{self.port}", "admin_listen": f"127.0.0.1:{self.admin}", "headers": {"replica": True},
            "replicas": [{"name": f"r{r.index}", "url": r.url} for r in replicas], "upstream": {"stream_timeout": f"{IDLE}s"}, **settings,
        }
        self.log = open(os.path.join(self.dir.name, "log"), "w+")
        self.process = subprocess.Popen([binary, "serve", "--config", self.file("config.json", json.dumps(config))], stderr=self.log)
        # What the last part has left behind must not decide where streams go.
        if until(lambda: all(r.ready() and r.running() == 0 for r in replicas), 60) is None:
            raise SystemExit("the replicas have other work")
        if until(lambda: all(r["state"] == "ready" for r in json.loads(fetch(f"http://127.0.0.1:{self.admin}/debug/fleet"))["replicas"]), 60) is None:
            self.log.seek(0)
            raise SystemExit("kvgate is not ready:\n" + self.log.read())
        time.sleep(settle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self.log.close()
        self.dir.cleanup()

    def file(self, name, text):
        path = os.path.join(self.dir.name, name)
        with open(path, "w") as f:
            f.write(text)
        os.chmod(path, 0o600)
        return path

    def connect(self, timeout=120):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(self, body, key=None):
        """Status and body of a plain answer."""
        c = self.connect()
        try:
            headers = {"Content-Type": "application/json"}
            if key:
                headers["Authorization"] = "Bearer " + key
            c.request("POST", CHAT, json.dumps(body), headers)
            r = c.getresponse()
            return r.status, r.read().decode()
        finally:
            c.close()

    def metric(self, name, labels=""):
        return series(fetch(f"http://127.0.0.1:{self.admin}/metrics"), name, labels)

    def matches(self, body, key):
        """The blocks that explain expects in the replicas' caches, the most of any."""
        url = f"http://127.0.0.1:{self.admin}/debug/explain?" + urllib.parse.urlencode({"path": CHAT, "key": key})
        req = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(req) as page:
            return max(r["match"] for r in json.load(page)["replicas"])


def words(seed, n):
    names = "harbour ledger cotton signal orchard copper lantern meadow engine violet granite whistle saddle compass".split()
    return " ".join(f"{names[(seed * 7 + i * i) % len(names)]}{seed}" for i in range(n))


def question(model, text, tokens, stream=False):
    return {"model": model, "stream": stream, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "temperature": 0,
            "messages": [{"role": "user", "content": text}]}


class Stream(threading.Thread):
    """One stream to its end."""

    def __init__(self, gate, model, n, tokens):
        super().__init__(daemon=True)
        self.gate, self.body = gate, question(model, words(n + 1, 20), tokens, True)
        self.replica, self.events, self.text, self.error, self.ended = None, 0, "", None, 0.0
        self.begun = threading.Event()
        self.start()

    def run(self):
        c = self.gate.connect()
        try:
            c.request("POST", CHAT, json.dumps(self.body), {"Content-Type": "application/json"})
            r = c.getresponse()
            self.replica = r.headers.get("x-kvgate-replica")
            if r.status != 200:
                raise OSError(f"status {r.status}: {r.read(300)!r}")
            while piece := r.read1(1 << 16):  # unlike readline it tells a broken end from a clean one
                self.text += piece.decode(errors="replace")
                self.events = self.text.count("data: ")
                if self.events:
                    self.begun.set()
        except (OSError, http.client.HTTPException) as e:
            self.error = f"{type(e).__name__} {e}"
        finally:
            self.ended = time.monotonic()
            self.begun.set()
            c.close()

    @property
    def done(self):
        return "data: [DONE]" in self.text

    @property
    def event(self):
        return '"error"' in self.text

    def __str__(self):
        return f"{self.replica} {self.events} events" + (", [DONE]" if self.done else "") + (", error event" if self.event else "") + (f", {self.error}" if self.error else "")


def streams(gate, model, tokens):
    """Starts the streams and waits until each has an event; those of both replicas."""
    all_ = [Stream(gate, model, n, tokens) for n in range(STREAMS)]
    for s in all_:
        s.begun.wait(120)
    return all_


def following(report, gate, model, what, count=50):
    failures = []
    for n in range(count):
        status, text = gate.ask(question(model, f"hello {n}", 2))
        if status != 200:
            failures.append(f"{n}: {status} {text[:120]}")
    report.line(not failures, f"{what}: the next {count} requests succeed", "; ".join(failures))


def survivors(report, all_, victim, at, what):
    """Judges the streams of the other replica and returns those of the victim that ran at a time."""
    for s in all_:
        s.join(180)
    mine, others = [s for s in all_ if s.replica == victim and s.ended > at], [s for s in all_ if s.replica != victim]
    report.line(bool(mine) and bool(others), f"{what}: both replicas had streams", f"{len(mine)} of {victim}, {len(others)} of the other")
    bad = [str(s) for s in others if s.error or not s.done or s.event]
    report.line(not bad, f"{what}: the streams of the other replica finish", "; ".join(bad))
    return mine


def part_kill_api(report, args, replicas):
    victim, name = replicas[0], "r0"
    family = victim.family()
    with Gate(args.kvgate, replicas, args.settle) as gate:
        all_ = streams(gate, args.model, args.tokens)
        at = time.monotonic()
        os.kill(family[0], signal.SIGKILL)
        until(victim.refuses, 10, 0.001)  # what comes before that may have been executed: it is not repeated
        following(report, gate, args.model, "kill-api")
        mine = survivors(report, all_, name, at, "kill-api")
        bad = [str(s) for s in mine if s.done or not s.error]
        report.line(not bad, "kill-api: its streams end as errors, without [DONE]", "; ".join(bad))
        failures = gate.metric("kvgate_upstream_errors_total", f'replica="{name}"')
        report.line(failures >= len(mine), "kill-api: failures are counted", f"{failures:.0f} of {len(mine)} streams")
    return victim.bring_back(family, args.last)


def part_kill_engine(report, args, replicas):
    victim, name = replicas[1], "r1"
    engine, family = victim.engine(), victim.family()
    if engine is None:
        report.skip("kill-engine: the replica has no process EngineCore")
        return True
    with Gate(args.kvgate, replicas, args.settle) as gate:
        all_ = streams(gate, args.model, args.tokens)
        at = time.monotonic()
        os.kill(engine, signal.SIGKILL)
        until(lambda: any(s.ended for s in all_ if s.replica == name), 60)
        following(report, gate, args.model, "kill-engine")
        mine = survivors(report, all_, name, at, "kill-engine")
        bad = [str(s) for s in mine if not s.event and not s.error]
        report.line(not bad, "kill-engine: its streams end with its error event, or broken", "; ".join(bad))
        events, counted = sum(s.event and not s.error for s in mine), gate.metric("kvgate_upstream_errors_total", f'reason="error_event",replica="{name}"')
        counted = counted or gate.metric("kvgate_upstream_errors_total", f'replica="{name}",reason="error_event"')
        report.line(counted >= events > 0, "kill-engine: error events are counted as failures", f"{counted:.0f} counted, {events} seen")
        print("     as it arrives:", next((s.text[s.text.index('data: {"error"'):].strip()[:200] for s in mine if 'data: {"error"' in s.text), "no error event"))
    return victim.bring_back(family, args.last)


def part_term(report, args, replicas):
    victim, name = replicas[0], "r0"
    family = victim.family()
    with Gate(args.kvgate, replicas, args.settle) as gate:
        all_ = streams(gate, args.model, args.tokens)
        at = time.monotonic()
        os.kill(family[0], signal.SIGTERM)
        following(report, gate, args.model, "term")
        mine = survivors(report, all_, name, at, "term")
        late = [str(s) for s in mine if s.is_alive() or s.ended - at > args.drain + IDLE + 5]
        report.line(not late, f"term: its streams end within the idle limit of {IDLE} s", "; ".join(late))
        hung = [s for s in mine if s.error]
        bad = [str(s) for s in hung if s.done or not s.event]
        report.line(not bad, "term: those that hung end with an error event and without [DONE]", "; ".join(bad) or f"{len(hung)} hung, {len(mine) - len(hung)} ended by themselves")
        report.line(gate.metric("kvgate_upstream_errors_total", f'replica="{name}"') >= len(hung), "term: those that hung are counted as failures")
    return victim.bring_back(family, args.last)


def part_hang(report, args, replicas):
    name, family = "r0", replicas[0].family()
    with Gate(args.kvgate, replicas, args.settle) as gate:
        all_ = streams(gate, args.model, args.tokens)
        at = time.monotonic()
        try:
            for pid in family:
                os.kill(pid, signal.SIGSTOP)
            mine = survivors(report, all_, name, at, "hang")
            late = [str(s) for s in mine if s.is_alive() or s.ended - at > IDLE + 5]
            report.line(not late, f"hang: its streams end within the idle limit of {IDLE} s", "; ".join(late))
            bad = [str(s) for s in mine if s.done or not s.event or not s.error]
            report.line(not bad, "hang: each with an error event, without [DONE] and without a clean end", "; ".join(bad))
            following(report, gate, args.model, "hang", 10)  # before it is tried again, which takes until header_timeout
            counted = gate.metric("kvgate_upstream_errors_total", f'reason="timeout",replica="{name}"') or gate.metric("kvgate_upstream_errors_total", f'replica="{name}",reason="timeout"')
            report.line(counted >= len(mine), "hang: counted as failures", f"{counted:.0f} of {len(mine)} streams")
        finally:
            for pid in family:
                os.kill(pid, signal.SIGCONT)


def part_abort(report, args, replicas):
    busy = lambda: sum(r.running() for r in replicas)
    with Gate(args.kvgate, replicas, args.settle) as gate:
        def leave(what, body, events):
            # vLLM publishes its gauge at the end of a step: now and then a request is never seen in it,
            # or is still seen when it is gone and nothing else runs. So: once more, and a nudge.
            for _ in range(3):
                c = gate.connect()
                c.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
                working = until(lambda: busy() > 0, 5, 0.005)
                if events:
                    r = c.getresponse()
                    for _ in range(events):
                        r.readline()
                c.sock.close() if c.sock else r.close()
                c.close()
                took = until(lambda: busy() == 0, 1.2)
                if took is None:
                    for r in replicas:
                        r.nudge(args.model)
                    again = until(lambda: busy() == 0, 0.5)
                    took = None if again is None else 1.2 + again
                if working is not None:
                    break
            report.line(working is not None and took is not None and took < 2, f"abort: {what} frees the replica within 2 s",
                        "it was never seen at work" if working is None else "never" if took is None else f"{took:.2f} s")

        prompt = words(991, args.long)
        leave("leaving while the head is due", question(args.model, prompt, args.tokens // 4, True), 0)
        leave("leaving a stream", question(args.model, "hello", args.tokens, True), 3)
        leave("leaving a plain answer", question(args.model, "hello", args.tokens), 0)
        left = gate.metric("kvgate_http_requests_in_flight")
        report.line(left == 0, "abort: nothing stays in flight in the gateway", f"{left:.0f}")


def part_isolation(report, args, replicas):
    keys = tempfile.NamedTemporaryFile("w", suffix=".yaml")
    keys.write("keys:\n- {name: alice, key: sk-alice-0123456789}\n- {name: bob, key: sk-bob-0123456789}\n")
    keys.flush()
    secret = tempfile.NamedTemporaryFile("w")
    secret.write("0123456789abcdef0123456789abcdef")
    secret.flush()
    with Gate(args.kvgate, replicas, 0, auth={"keys_file": keys.name}, isolation={"mode": "key", "secret_file": secret.name}) as gate:
        body = question(args.model, f"{time.time_ns()} " + words(17, args.long), 2)
        hits = lambda: sum(r.hits() for r in replicas)

        def ask(name, shared, what):
            time.sleep(1)  # counters and events of the last answer
            before, expected = hits(), gate.matches(body, name)
            status, text = gate.ask(body, f"sk-{name}-0123456789")
            time.sleep(1)
            found = hits() - before
            ok = status == 200 and (found > 0) == shared and (expected > 0) == shared
            report.line(ok, f"isolation: {what}", f"explain expects {expected} blocks, the replicas found {found:.0f} tokens" + ("" if status == 200 else f", status {status} {text[:200]}"))

        ask("alice", False, "the first request finds nothing")
        ask("alice", True, "the same key finds its own blocks")
        ask("bob", False, "another key finds none of them")
        ask("bob", True, "and then its own")
    keys.close()
    secret.close()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kvgate")
    p.add_argument("replica", nargs=2, help="URL")
    p.add_argument("--model", help="default: the first that the replicas serve")
    p.add_argument("--restart", default="", help="command that starts the replica on {port} ({i}: 0 or 1) and stays in the foreground")
    p.add_argument("--tokens", type=int, default=1000, help="tokens of a stream: it must last longer than the others take to begin")
    p.add_argument("--long", type=int, default=200, help="words of a long prompt")
    p.add_argument("--drain", type=float, default=0, help="seconds that a replica goes on after SIGTERM")
    p.add_argument("--settle", type=float, default=11, help="seconds before streams start: a replica that was away comes back slowly, for 10 s")
    p.add_argument("--parts", default="isolation,abort,hang,kill-api,kill-engine,term")
    args = p.parse_args()
    replicas = [Replica(i, url, args.restart) for i, url in enumerate(args.replica)]
    args.model = args.model or json.loads(fetch(replicas[0].url + "/v1/models"))["data"][0]["id"]
    parts = {"isolation": part_isolation, "abort": part_abort, "hang": part_hang, "kill-api": part_kill_api, "kill-engine": part_kill_engine, "term": part_term}
    report, gone = Report(), False
    names = args.parts.split(",")
    try:
        for name in names:
            args.last = name == names[-1]
            if gone:
                report.skip(f"{name}: a replica is gone and --restart is not given")
                continue
            gone = parts[name](report, args, replicas) is False
    finally:
        for r in replicas:
            r.end()
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
