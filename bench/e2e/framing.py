#!/usr/bin/env python3
"""Sends proxy/testdata/framing.txt through kvgate and has what it forwards read by
two parsers of the servers behind it: httptools (llhttp, uvicorn's default) and h11.

    pip install httptools h11
    make build && python3 bench/e2e/framing.py ./kvgate

Both must read the bytes of every connection as exactly one request, the same one
(method, target, fields, body), and the one that the corpus names. Nothing may
arrive of a stream that the corpus refuses. Exits 1 on a difference.
"""
import ast
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import h11
import httptools

ANSWER = b'{"id":"x","choices":[]}'
CORPUS = pathlib.Path(__file__).parents[2] / "proxy/testdata/framing.txt"


def corpus():
    """Yields (name, verdict, stream, sent) of every case."""
    macros = {}

    def parts(text):
        out = b""
        for m in re.finditer(r'(\$.)|("(?:[^"\\]|\\.)*")(?:\*(\d+))?', text):
            out += macros[m[1]] if m[1] else ast.literal_eval("b" + m[2]) * int(m[3] or 1)
        return out

    for line in CORPUS.read_text().splitlines():
        if not line or line[0] == "#":
            continue
        if line[0] == "$":
            macros[line[:2]] = parts(line[5:])
            continue
        name, verdict, stream = line.split(": ", 2)
        stream, _, sent = stream.partition(" -> ")
        sent = parts(sent) if sent else macros["$D"] * verdict.split().count("200")
        yield name, verdict, parts(stream), sent.decode()


class Upstream:
    """A replica that keeps every byte of every connection but the scraper's, which GETs."""

    def __init__(self):
        self.ln = socket.create_server(("127.0.0.1", 0))
        self.port = self.ln.getsockname()[1]
        self.lock = threading.Lock()
        self.streams, self.open = [], 0
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            c, _ = self.ln.accept()
            threading.Thread(target=self.serve, args=(c,), daemon=True).start()

    def serve(self, c):
        raw = b""
        answered = False
        counted = False
        try:
            while piece := c.recv(1 << 16):
                raw += piece
                if not counted and not raw.startswith(b"GET "):
                    counted = True
                    with self.lock:
                        self.open += 1
                head, end, body = raw.partition(b"\r\n\r\n")
                length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
                if not answered and end and len(body) >= int(length[1] if length else 0):
                    answered = True
                    answer = ANSWER
                    if raw.startswith(b"GET /v1/models"):
                        answer = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
                    c.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))
                    c.shutdown(socket.SHUT_WR)
        except ConnectionError:
            pass
        c.close()
        with self.lock:
            self.open -= counted
            if counted:
                self.streams.append(raw)

    def take(self):
        end = time.time() + 5
        while time.time() < end:
            with self.lock:
                if not self.open:
                    break
            time.sleep(0.002)
        with self.lock:
            out, self.streams = self.streams, []
        return out


def by_h11(raw):
    """Every request in raw as (method, target, fields, body)."""
    out = []
    while raw:
        c = h11.Connection(h11.SERVER)
        c.receive_data(raw)
        body = b""
        while True:
            event = c.next_event()
            if isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                return out + [f"h11: {event}"]
        out.append((request.method, request.target, [(n.lower(), v) for n, v in request.headers], body))
        raw = c.trailing_data[0]
    return out


def by_httptools(raw):
    """Every request in raw as (method, target, fields, body)."""
    out = []

    class Protocol:
        def on_message_begin(self):
            self.target, self.fields, self.body = b"", [], b""

        def on_url(self, url):
            self.target += url

        def on_header(self, name, value):
            self.fields.append((name.lower(), value))

        def on_body(self, body):
            self.body += body

        def on_message_complete(self):
            out.append((parser.get_method(), self.target, self.fields, self.body))

    parser = httptools.HttpRequestParser(Protocol())
    try:
        parser.feed_data(raw)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as e:
        return out + [f"httptools: {e!r}"]
    return out


def send(port, stream, cut):
    """Sends a stream and returns the statuses of the answers."""
    c = socket.create_connection(("127.0.0.1", port))
    c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    got = b""
    try:
        c.sendall(stream)
        if cut:
            c.shutdown(socket.SHUT_WR)
        c.settimeout(0.15)
        while piece := c.recv(1 << 16):
            got += piece
    except (TimeoutError, ConnectionError):
        pass
    c.close()
    return re.findall(rb"(?:^|[}\n])HTTP/1\.1 (\d+)", got)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


def main():
    upstream = Upstream()
    port, admin = free_port(), free_port()
    log = tempfile.TemporaryFile()
    gate = subprocess.Popen([sys.argv[1], "serve", "--listen", f"127.0.0.1:{port}", "--admin-listen", f"127.0.0.1:{admin}", "--log-access=false",
                             "--scrape-interval", "1s", "--upstream-idle-timeout", "50ms", "--replica", f"http://127.0.0.1:{upstream.port}"], stdout=log, stderr=log)
    cases = forwarded = differences = 0
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1)
                break
            except OSError:
                time.sleep(0.1)
        upstream.take()
        for name, verdict, stream, sent in corpus():
            cases += 1
            statuses = send(port, stream, "cut" in verdict)
            read = []
            for raw in upstream.take():
                forwarded += 1
                one, other = by_h11(raw), by_httptools(raw)
                read += one
                if len(one) != 1 or one != other:
                    differences += 1
                    print(f"{name}: the parsers differ\n  h11       {one}\n  httptools {other}")
            text = "".join(r if isinstance(r, str) else f"{r[0].decode()} {r[1].decode()}\n{r[3].decode()}\n" for r in read)
            if text != sent:
                differences += 1
                print(f"{name}: forwarded {text!r}, want {sent!r}; answers {statuses}")
        if gate.poll() is not None:
            differences += 1
            print(f"kvgate ended with status {gate.returncode}")
    finally:
        gate.terminate()
        gate.wait()
    print(f"{cases} streams, {forwarded} requests forwarded, {differences} differences between httptools, h11 and the corpus")
    return 1 if differences or not forwarded else 0


if __name__ == "__main__":
    sys.exit(main())
