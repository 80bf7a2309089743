#!/usr/bin/env python3
"""Injects faults into two running replicas behind kvgate and says, line by line,
whether what must hold does. Standard library only; Linux (processes are found in /proc).

    vllm serve MODEL --port 8102 ... & vllm serve MODEL --port 8103 ... &
    make build && python3 bench/e2e/faults.py ./kvgate http://127.0.0.1:8102 http://127.0.0.1:8103 \\
        --restart 'exec vllm serve MODEL --port {port} ...'

The parts, each of which starts a kvgate of its own:

    isolation   with isolation.mode key, one prompt of two API keys shares no cached block
                (the replicas' hit counters and kvgate's explain agree), of one key it does
    abort       a client that leaves while the head is due, in a stream, and in a plain answer
                frees the replica: vllm:num_requests_running is 0 within 2 s, long before the
                request would have ended by itself
    hang        a replica that is stopped amid its streams (SIGSTOP): the idle limit ends them
                with an error event, the next 10 requests succeed
    kill-api    kill -9 of one replica's server amid 16 streams: its streams end as errors
                and never with [DONE], the others finish, the next 50 requests succeed
    kill-engine kill -9 of one EngineCore: its error event is passed on as a client without
                kvgate gets it and counted, the next 50 requests succeed
    term        SIGTERM of one replica whose streams may hang: each ends, by itself or by
                the idle limit with an error event; the next 50 requests succeed

The last three take a replica away. --restart is the command that brings it back: {port} and
{i} (0 or 1) are filled in; what the script has started it ends. Without it only the
first of them runs. Exits 1 when a line says FAIL.

Streams are as long as the model's context allows. Only those are judged that were in the
middle when the fault came; a part fails when it has fewer than 5 of either replica. Replicas
with a context of 2048 tokens and room in the cache for 10 such streams each will do, as they
are started and as --restart starts them again: one without makes streams wait for each other.
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
ENOUGH = 5  # streams of a replica to judge; as many failures in a row as leave a replica out
IDLE = 10  # seconds: kvgate's stream_timeout, the idle limit of a stream; a busy machine makes a replica pause for 5


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
        """Has the engine do one step: what its gauges show is what they were at the end of the last one."""
        urllib.request.urlopen(urllib.request.Request(self.url + CHAT, json.dumps(question(model, "step", 1)).encode(), {"Content-Type": "application/json"})).read()

    def running(self):
        return self.metric("vllm:num_requests_running", "vllm:num_requests_waiting")

    def generated(self):
        return self.metric("vllm:generation_tokens_total")

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

    def __init__(self, args, replicas, settle, **settings):
        binary, model = args.kvgate, args.model
        self.dir = tempfile.TemporaryDirectory()
        self.port, self.admin = free_port(), free_port()
        config = {
            "listen": f"127.0.0.1:{self.port}", "admin_listen": f"127.0.0.1:{self.admin}", "headers": {"replica": True},
            "replicas": [{"name": f"r{r.index}", "url": r.url} for r in replicas], "log": {"format": "json"}, "upstream": {"stream_timeout": f"{IDLE}s"}, **settings,
        }
        self.log = open(os.path.join(self.dir.name, "log"), "w+")
        self.process = subprocess.Popen([binary, "serve", "--config", self.file("config.json", json.dumps(config))], stderr=self.log)
        # What the last part has left behind must not decide where streams go.
        if until(lambda: idle(replicas, model), 60, 0.5) is None:
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

    def in_flight(self):
        return self.metric("kvgate_http_requests_in_flight")

    def left(self):
        """The access lines of clients that have left: status and phase of each."""
        self.log.seek(0)
        lines = [json.loads(line) for line in self.log if line.startswith("{") and line.endswith("}\n")]
        return [(line["status"], line["phase"]) for line in lines if line.get("client_gone")]

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
    """One stream to its end. It keeps up with the replica, so that what it has read is what there is."""

    def __init__(self, connection, model, n, tokens):
        super().__init__(daemon=True)
        self.connection, self.tokens, self.body = connection, tokens, question(model, words(n + 1, 20), tokens, True)
        self.replica, self.raw, self.events, self.error, self.ended, self.amid = None, bytearray(), 0, None, 0.0, False
        self.begun = threading.Event()
        self.start()

    def run(self):
        c, mark = self.connection, b"data: "
        try:
            c.request("POST", CHAT, json.dumps(self.body), {"Content-Type": "application/json"})
            r = c.getresponse()
            self.replica = r.headers.get("x-kvgate-replica")
            if r.status != 200:
                raise OSError(f"status {r.status}: {r.read(300)!r}")
            while piece := r.read1(1 << 16):  # unlike readline it tells a broken end from a clean one
                seen = max(len(self.raw) - len(mark) + 1, 0)
                self.raw += piece
                self.events += self.raw.count(mark, seen)
                if self.events:
                    self.begun.set()
        except (OSError, http.client.HTTPException) as e:
            self.error = f"{type(e).__name__} {e}"
        finally:
            self.ended = time.monotonic()
            self.begun.set()
            c.close()

    def look(self):
        """Notes whether the stream is in the middle now."""
        self.amid = 0 < self.events < 0.8 * self.tokens and not self.ended and not self.whole

    @property
    def text(self):
        return self.raw.decode(errors="replace")

    @property
    def whole(self):
        """The engine has said that all tokens are there."""
        return b'"finish_reason":"length"' in self.raw

    @property
    def done(self):
        return b"data: [DONE]" in self.raw

    @property
    def event(self):
        return b'"error"' in self.raw

    def __str__(self):
        return f"{self.replica} {self.events} events" + (", all tokens" if self.whole else "") + (", [DONE]" if self.done else "") + \
            (", error event" if self.event else "") + (f", {self.error}" if self.error else "")


def idle(replicas, model):
    """Whether the replicas are there and have nothing to do."""
    for r in replicas:
        if not r.ready():
            return False
        if r.running():
            r.nudge(model)
            return False
    return True


def longest(args, replica, text):
    """The tokens that an answer to a text may have."""
    if args.tokens:
        return args.tokens
    body = json.dumps(question(args.model, text, 1)).encode()
    with urllib.request.urlopen(urllib.request.Request(replica.url + CHAT, body, {"Content-Type": "application/json"})) as answer:
        return args.context - json.load(answer)["usage"]["prompt_tokens"] - 64


def streams(gate, args, replicas):
    """Starts the streams, waits until each has an event, and notes which are in the middle."""
    tokens = longest(args, replicas[0], words(STREAMS + 1, 20))
    all_ = [Stream(gate.connect(), args.model, n, tokens) for n in range(STREAMS)]
    for s in all_:
        s.begun.wait(120)
    for s in all_:
        s.look()
    return all_


def following(report, gate, model, what, count=50, seconds=None):
    """Judges the requests that come next; with seconds, those of that time, which must be half of them."""
    failures, asked, begin = [], 0, time.monotonic()
    while asked < count and (seconds is None or time.monotonic() - begin < seconds):
        status, text = gate.ask(question(model, f"hello {asked}", 2))
        asked += 1
        if status != 200:
            failures.append(f"{asked}: {status} {text[:120]}")
    few = "" if 2 * asked >= count else f"only {asked} could be asked in {seconds} s"
    report.line(not failures and not few, f"{what}: the next {count} requests succeed", "; ".join(failures) or few)


def fallen(all_, victim, what, report):
    """Waits for the ends of the victim's streams and returns those that the fault came amid."""
    its = [s for s in all_ if s.replica == victim]
    for s in its:
        s.join(180)
    mine = [s for s in its if s.amid and not s.whole]
    report.line(len(mine) >= ENOUGH, f"{what}: at least {ENOUGH} streams of the replica are in the middle when it comes", f"{len(mine)} of {len(its)}")
    return mine


def survivors(report, all_, victim, what):
    """Judges the streams of the other replica."""
    others = [s for s in all_ if s.replica != victim]
    for s in others:
        s.join(180)
    amid = sum(s.amid for s in others)
    report.line(amid >= ENOUGH, f"{what}: as are {ENOUGH} of the other", f"{amid} of {len(others)}")
    bad = [str(s) for s in others if s.is_alive() or s.error or not s.done or not s.whole or s.event]
    report.line(not bad, f"{what}: the streams of the other replica finish", "; ".join(bad))


def counted(gate, name, reason=""):
    """The failures that kvgate has counted of a replica, for a reason or any."""
    page = fetch(f"http://127.0.0.1:{gate.admin}/metrics")
    return series("\n".join(line for line in page.splitlines() if f'replica="{name}"' in line and reason in line), "kvgate_upstream_errors_total")


def part_kill_api(report, args, replicas):
    victim, name = replicas[0], "r0"
    family = victim.family()
    with Gate(args, replicas, args.settle) as gate:
        all_ = streams(gate, args, replicas)
        os.kill(family[0], signal.SIGKILL)
        until(victim.refuses, 10, 0.001)  # what comes before that may have been executed: it is not repeated
        following(report, gate, args.model, "kill-api")
        mine = fallen(all_, name, "kill-api", report)
        bad = [str(s) for s in mine if s.is_alive() or s.done or not s.error]
        report.line(not bad, "kill-api: its streams end as errors, without [DONE]", "; ".join(bad))
        failures = counted(gate, name)
        report.line(failures >= len(mine), "kill-api: failures are counted", f"{failures:.0f} of {len(mine)} streams")
        survivors(report, all_, name, "kill-api")
    return victim.bring_back(family, args.last)


def part_kill_engine(report, args, replicas):
    victim, name = replicas[1], "r1"
    engine, family = victim.engine(), victim.family()
    if engine is None:
        report.skip("kill-engine: the replica has no process EngineCore")
        return True
    last = lambda s: next((event for event in s.text.split("\n\n") if event.startswith('data: {"error"')), "no error event")
    with Gate(args, replicas, args.settle) as gate:
        direct = Stream(http.client.HTTPConnection("127.0.0.1", victim.port, timeout=120), args.model, STREAMS, longest(args, victim, words(STREAMS + 1, 20)))
        direct.begun.wait(120)
        all_ = streams(gate, args, replicas)
        latest = Stream(http.client.HTTPConnection("127.0.0.1", victim.port, timeout=120), args.model, STREAMS + 1, longest(args, victim, words(STREAMS + 2, 20)))
        latest.begun.wait(120)
        os.kill(engine, signal.SIGKILL)
        # Until it is left out, or has gone, a request that it takes gets its 500.
        until(lambda: sum(s.replica == name and s.ended > 0 for s in all_) >= ENOUGH and victim.refuses() or all(s.ended for s in all_ if s.replica == name), 60)
        following(report, gate, args.model, "kill-engine")
        mine = fallen(all_, name, "kill-engine", report)
        bad = [str(s) for s in mine if s.is_alive() or not s.event and not s.error]
        report.line(not bad, "kill-engine: its streams end with its error event, or broken", "; ".join(bad))
        its, failures = [s for s in mine if s.event and not s.error], counted(gate, name, 'reason="error_event"')
        direct.join(60)
        latest.join(60)
        # A server that ends first tells those that came last nothing, with kvgate or without.
        report.line(failures >= len(its) and (its or not latest.event), "kill-engine: error events are counted as failures",
                    f"{failures:.0f} counted, {len(its)} seen; the client without kvgate that came last saw {'one' if latest.event else 'none'}")
        odd = [last(s)[:200] for s in its if last(s) != last(direct) or s.done != direct.done]
        report.line(not odd and direct.event, "kill-engine: they arrive as without kvgate", "; ".join(odd) or last(direct)[:200] + (" and [DONE]" if direct.done else ""))
        survivors(report, all_, name, "kill-engine")
    return victim.bring_back(family, args.last)


def part_term(report, args, replicas):
    victim, name = replicas[0], "r0"
    family = victim.family()
    with Gate(args, replicas, args.settle) as gate:
        all_ = streams(gate, args, replicas)
        at = time.monotonic()
        os.kill(family[0], signal.SIGTERM)
        until(victim.refuses, 10, 0.001)  # what it has taken before that is as lost as its streams
        following(report, gate, args.model, "term")
        mine = fallen(all_, name, "term", report)
        late = [str(s) for s in mine if s.is_alive() or s.ended - at > args.drain + IDLE + 10]
        report.line(not late, f"term: its streams end within the idle limit of {IDLE} s", "; ".join(late))
        hung = [s for s in mine if s.error]
        bad = [str(s) for s in hung if s.done or not s.event] + [str(s) for s in mine if not s.error and not s.done]
        report.line(not bad, "term: those that hung end with an error event and without [DONE]", "; ".join(bad) or f"{len(hung)} hung, {len(mine) - len(hung)} ended by themselves")
        report.line(counted(gate, name) >= len(hung), "term: those that hung are counted as failures")
        survivors(report, all_, name, "term")
    return victim.bring_back(family, args.last)


def part_hang(report, args, replicas):
    name, family = "r0", replicas[0].family()
    with Gate(args, replicas, args.settle) as gate:
        all_ = streams(gate, args, replicas)
        at = time.monotonic()
        try:
            for pid in family:
                os.kill(pid, signal.SIGSTOP)
            mine = fallen(all_, name, "hang", report)
            following(report, gate, args.model, "hang", 10, 8)  # after 10 s it is tried again, which takes until header_timeout
            late = [str(s) for s in mine if s.is_alive() or s.ended - at > IDLE + 10]
            report.line(not late, f"hang: its streams end within the idle limit of {IDLE} s", "; ".join(late))
            bad = [str(s) for s in mine if s.done or not s.event or not s.error]
            report.line(not bad, "hang: each with an error event, without [DONE] and without a clean end", "; ".join(bad))
            failures = counted(gate, name, 'reason="timeout"')
            report.line(failures >= len(mine), "hang: counted as failures", f"{failures:.0f} of {len(mine)} streams")
            survivors(report, all_, name, "hang")
        finally:
            for pid in family:
                os.kill(pid, signal.SIGCONT)


def part_abort(report, args, replicas):
    busy = lambda: sum(r.running() for r in replicas)
    generated = lambda: sum(r.generated() for r in replicas)

    def freed(begin):
        """The seconds from begin until no replica has work, None when it is more than 2."""
        nudged = 0.0
        while (passed := time.monotonic() - begin) < 2:
            if busy() == 0:
                return time.monotonic() - begin
            if passed - nudged > 0.5:  # without another request the gauge may stand still
                nudged = passed
                for r in replicas:
                    r.nudge(args.model)
            time.sleep(0.02)
        return None

    with Gate(args, replicas, args.settle) as gate:
        def leave(what, text, stream, events, phase, stopped=False, tries=3):
            tokens = longest(args, replicas[0], text)
            if until(lambda: idle(replicas, args.model), 30, 0.2) is None:
                return report.line(False, f"abort: {what}", "the replicas did not come to rest before")
            before, lines = generated(), len(gate.left())
            c = gate.connect()
            pids = [r.pid() for r in replicas] if stopped else []
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            try:
                c.request("POST", CHAT, json.dumps(question(args.model, text, tokens, stream)), {"Content-Type": "application/json"})
                r = c.getresponse() if events else None
                for _ in range(events):
                    r.readline()
                seen = until(lambda: gate.in_flight() == 1 and (stopped or busy() > 0), 20, 0.005)
                if stopped:
                    time.sleep(0.2)  # the request is on its way
                begin = time.monotonic()
                c.sock.shutdown(socket.SHUT_RDWR) if c.sock else r.close()
                c.close()
                over = until(lambda: gate.in_flight() == 0, 5, 0.005)
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
                    begin = time.monotonic()
            took = freed(begin)
            passed, made = time.monotonic() - begin, generated() - before
            until(lambda: len(gate.left()) > lines, 2)
            noted = gate.left()[lines:]
            detail = f"gateway {'never' if over is None else f'{over:.2f} s'}, replica {'never' if took is None else f'{took:.2f} s'}, {made:.0f} of {tokens} tokens made, noted as {noted}"
            if seen is None:
                if tries > 1 and made >= 0.8 * tokens:  # answered to its end: the replica's gauge misses a request now and then
                    return leave(what, text, stream, events, phase, stopped, tries - 1)
                detail = "it was never seen at work; " + detail
            ok = seen is not None and over is not None and over < 2 and took is not None and passed < 4 and made < 0.8 * tokens and [p for _, p in noted] == [phase]
            report.line(ok, f"abort: {what} frees the replica within 2 s", detail)

        leave("leaving while the head of a stream is due", "hello once more", True, 0, "header-wait", stopped=True)
        leave("leaving a stream", "hello", True, 3, "stream")
        leave("leaving a stream of which nothing was read", "hello there", True, 0, "stream")
        leave("leaving a plain answer", "hello", False, 0, "header-wait")
        left = gate.in_flight()
        report.line(left == 0, "abort: nothing stays in flight in the gateway", f"{left:.0f}")


def part_isolation(report, args, replicas):
    keys = tempfile.NamedTemporaryFile("w", suffix=".yaml")
    keys.write("keys:\n- {name: alice, key: sk-alice-0123456789}\n- {name: bob, key: sk-bob-0123456789}\n")
    keys.flush()
    secret = tempfile.NamedTemporaryFile("w")
    secret.write("0123456789abcdef0123456789abcdef")
    secret.flush()
    with Gate(args, replicas, 0, auth={"keys_file": keys.name}, isolation={"mode": "key", "secret_file": secret.name}) as gate:
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
    p.add_argument("--tokens", type=int, default=0, help="tokens of a stream, which must last longer than the others take to begin; default: what the context allows")
    p.add_argument("--long", type=int, default=200, help="words of a long prompt")
    p.add_argument("--drain", type=float, default=0, help="seconds that a replica goes on after SIGTERM")
    p.add_argument("--settle", type=float, default=11, help="seconds before streams start: a replica that was away comes back slowly, for 10 s")
    p.add_argument("--parts", default="isolation,abort,hang,kill-api,kill-engine,term")
    args = p.parse_args()
    replicas = [Replica(i, url, args.restart) for i, url in enumerate(args.replica)]
    cards = json.loads(fetch(replicas[0].url + "/v1/models"))["data"]
    args.model = args.model or cards[0]["id"]
    args.context = next((card.get("max_model_len") for card in cards if card["id"] == args.model), None)
    if not args.context and not args.tokens:
        p.error("the replicas do not say how long the model's context is: give --tokens")
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
