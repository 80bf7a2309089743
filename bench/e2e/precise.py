#!/usr/bin/env python3
"""Asks real vLLM replicas through kvgate and says how well kvgate knew what they
had cached: its access log's predicted_tok against cached_tok, which is what vLLM
tells in usage.prompt_tokens_details.cached_tokens.

Two replicas whose cache is too small for the conversations (128 blocks of 32 tokens):

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --port 8100 --enable-prefix-caching --num-gpu-blocks-override 128 \\
      --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5600","replay_endpoint":"tcp://*:5700","topic":"kv@127.0.0.1:8100@MODEL"}' \\
      --enable-prompt-tokens-details --enable-scale-out
    python3 bench/e2e/precise.py --kvgate ./kvgate --model MODEL --replica http://127.0.0.1:8100 --replica http://127.0.0.1:8101

Every arm is a gateway of its own in front of empty caches, with the same
conversations: chats behind common system prompts, questions about documents,
token ids, salts, the Anthropic and the Responses dialect, streams and plain
answers, prompts that repeat. Arms with one request at a time leave --gap seconds
between an answer and the next request, so that vLLM's events are in. The limit on the
mean error of approx-parallel and cost-parallel is for caches that have room for
what runs: 512 blocks and --concurrency 8. Exits 1 when a limit is missed.
"""
import argparse
import collections
import concurrent.futures
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))

WORDS = """harbour ledger cotton signal orchard copper lantern meadow engine violet granite whistle saddle compass
anchor barley timber canyon ribbon kettle marble falcon pepper drawer island thunder candle basket mirror garden
window planet bridge silver winter shadow letter castle forest summer 木 山 море été ☂ {"a":[1,2]} def f(x): return""".split()

PRECISE = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: token-producer
    parameters: {vllm: {}}
  - type: precise-prefix-cache-producer
    parameters:
      tokenProcessorConfig: {blockSizeTokens: %d, hashAlgorithm: xxh64}
      speculativeIndexing: true
  - type: prefix-cache-scorer
    parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}
  - type: queue-scorer
  - type: kv-cache-utilization-scorer
schedulingProfiles:
  - name: default
    plugins:
      - {pluginRef: prefix-cache-scorer, weight: 3}
      - {pluginRef: queue-scorer, weight: 2}
      - {pluginRef: kv-cache-utilization-scorer, weight: 2}
"""

# name: (profile, in parallel?, least part of exact predictions, most mean error as part of the prompt)
ARMS = {
    "precise": ("precise", False, "min_exact", None),
    "approx": ("", False, None, None),
    "precise-parallel": ("precise", True, None, None),
    "approx-parallel": ("", True, None, "max_error"),
    "cost-parallel": ("cost", True, None, "max_error"),
}


class Conversation:
    """Some requests that belong together. Each has a path, a body and whether it is a stream."""

    def __init__(self, kind, number, rnd, args):
        self.kind, self.rnd, self.args = kind, rnd, args
        self.name = f"{kind}-{number}"
        self.turns = rnd.randint(2, 7)
        self.done = 0
        shared = random.Random(f"{args.seed}-{kind}-{number % 3}")  # three conversations out of nine begin alike
        self.head = words(shared, args.head * rnd.choice([40, 90]))
        self.messages = []
        self.ids = [shared.randrange(4, 1000) for _ in range(args.head * shared.randint(60, 260))]

    def next(self):
        """Returns the next request, or None when the conversation is over or too long."""
        if self.done == self.turns:
            return None
        self.done += 1
        stream = self.done % 2 == 0
        body = {"model": self.args.lora if self.kind == "lora" else self.args.model, "stream": stream}
        limit = self.rnd.randint(1, 40)
        if self.kind == "document":
            question = words(self.rnd, 8)
            path, body = "/v1/completions", body | {"prompt": self.head + " " + self.head[::-1] + "\n" + question, "max_tokens": limit}
        elif self.kind == "ids":
            self.ids += [self.rnd.randrange(4, 1000) for _ in range(self.rnd.randint(1, 70))]
            path, body = "/v1/completions", body | {"prompt": list(self.ids), "max_tokens": limit}
        elif self.kind == "repeat":
            path, body = "/v1/completions", body | {"prompt": self.head, "max_tokens": limit}
        elif self.kind == "messages":
            self.say()
            path, body = "/v1/messages", body | {"system": self.head, "messages": self.messages, "max_tokens": limit}
        elif self.kind == "responses":
            self.say()
            path, body = "/v1/responses", body | {"instructions": self.head, "input": self.messages, "max_output_tokens": limit}
        else:
            self.say()
            path, body = "/v1/chat/completions", body | {"messages": [{"role": "system", "content": self.head}] + self.messages, "max_tokens": limit}
            if self.kind == "salted":
                body["cache_salt"] = self.name[-1]
        if stream and "completions" in path:
            body["stream_options"] = {"include_usage": True}
        return path, body

    def say(self):
        text = words(self.rnd, self.rnd.randint(3, 25))
        parts = self.kind == "chat" and self.done % 3 == 0
        self.messages.append({"role": "user", "content": [{"type": "text", "text": text}] if parts else text})

    def hear(self, text):
        self.messages.append({"role": "assistant", "content": text or "well"})


def words(rnd, n):
    return " ".join(rnd.choice(WORDS) for _ in range(n))


def conversations(args):
    """The conversations of every arm, made anew with the same seed."""
    rnd = random.Random(args.seed)
    kinds = ["chat", "chat", "document", "ids", "salted", "repeat", "messages", "responses"] + ["lora"] * bool(args.lora)
    out, requests, number = [], 0, 0
    while requests < args.requests:
        c = Conversation(kinds[number % len(kinds)], number // len(kinds), random.Random(rnd.random()), args)
        c.turns = min(c.turns, args.requests - requests)
        requests += c.turns
        number += 1
        out.append(c)
    return out


def texts(answer):
    """What an answer says: strings under content or text, in any dialect."""
    if isinstance(answer, list):
        return "".join(map(texts, answer))
    if not isinstance(answer, dict):
        return ""
    found = ""
    for key in ("choices", "message", "content", "text", "delta", "output"):
        value = answer.get(key)
        found += value if isinstance(value, str) else texts(value)
    return found


def ask(base, path, body, name, timeout=300):
    """Posts a request and returns the answer's text."""
    headers = {"content-type": "application/json", "x-request-id": name}
    request = urllib.request.Request(base + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            data = answer.read().decode()
    except urllib.error.HTTPError as e:
        raise RuntimeError(f"{name}: {path}: status {e.code}: {e.read().decode()[:300]}") from e
    if not body.get("stream"):
        return texts(json.loads(data))
    events = [json.loads(line[5:]) for line in data.splitlines() if line.startswith("data:") and line[5:].strip() != "[DONE]"]
    # The Responses dialect has the text in deltas that are strings, and again in the events that end something.
    return "".join(e["delta"] if isinstance(e.get("delta"), str) else texts(e) if "type" not in e or e["type"] == "content_block_delta" else "" for e in events)


def converse(base, arm, c, gap=0.0):
    request = c.next()
    if request is None:
        return False
    c.hear(ask(base, *request, f"{arm}.{c.name}.{c.done}"))
    time.sleep(gap)
    return True


def load(base, arm, parallel, args):
    todo = conversations(args)
    if parallel:
        def all_turns(c):
            while converse(base, arm, c):
                pass
        with concurrent.futures.ThreadPoolExecutor(args.concurrency) as pool:
            list(pool.map(all_turns, todo))
        return
    rnd = random.Random(args.seed + 1)
    open_ones, todo = todo[:8], todo[8:]
    while open_ones:
        c = rnd.choice(open_ones)
        if not converse(base, arm, c, args.gap):
            open_ones.remove(c)
            open_ones += todo[:1]
            todo = todo[1:]


def get(url):
    with urllib.request.urlopen(url, timeout=10) as page:
        return page.read().decode()


def until(what, condition, seconds=30):
    end = time.time() + seconds
    while not (found := condition()):
        if time.time() > end:
            raise RuntimeError(f"{what}: not within {seconds} s")
        time.sleep(0.05)
    return found


def answers(url):
    try:
        return get(url)
    except (OSError, ValueError):
        return ""


def empty(args):
    """Empties the caches. vLLM publishes that with its next step only."""
    for url in args.replica:
        try:
            urllib.request.urlopen(urllib.request.Request(url + "/reset_prefix_cache", b""), timeout=30).close()
        except urllib.error.HTTPError as e:
            sys.exit(f"{url}/reset_prefix_cache: status {e.code}: start vLLM with VLLM_SERVER_DEV_MODE=1")
        ask(url, "/v1/completions", {"model": args.model, "prompt": words(random, 20), "max_tokens": 2}, "empty")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def sum_of(page, series):
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(series))


def run(arm, args, tmp):
    profile, parallel, _, _ = ARMS[arm]
    empty(args)
    data, admin = free_port(), free_port()
    log = os.path.join(tmp, arm + ".log")
    command = [args.kvgate, "serve", "--listen", f"127.0.0.1:{data}", "--admin-listen", f"127.0.0.1:{admin}", "--log-format", "json"]
    for url in args.replica:
        command += ["--replica", url]
    if profile == "precise":
        scheduling = os.path.join(tmp, "precise.yaml")
        with open(scheduling, "w") as f:
            f.write(PRECISE % args.block_tokens)
        command += ["--scheduling", scheduling]
    elif profile == "cost":
        command += ["--scheduling", os.path.join(HERE, "..", "..", "configs", "expected-cost.yaml")]
    with open(log, "w") as out:
        gateway = subprocess.Popen(command, stdout=out, stderr=out)
    base, admin = f"http://127.0.0.1:{data}", f"http://127.0.0.1:{admin}"
    try:
        until("kvgate is ready", lambda: answers(base + "/readyz"))
        if profile == "precise":
            until("kvgate has every replica's events", lambda: sum_of(get(admin + "/metrics"), "kvgate_kv_events_connected") == len(args.replica))
        begun = time.time()
        load(base, arm, parallel, args)
        took = time.time() - begun

        def lines():
            with open(log) as f:
                read = [json.loads(line) for line in f if line.startswith("{") and arm + "." in line]
            return read if len(read) >= args.requests else None
        read = until("the access log is whole", lines)
        page = get(admin + "/metrics")
        fleet = json.loads(get(admin + "/debug/fleet"))
    finally:
        gateway.terminate()
        gateway.wait(60)
    return dict(arm=arm, took=took, lines=read, page=page, in_flight=sum(r["in_flight"] + r["awaiting"] for r in fleet["replicas"]))


def judge(result, args):
    """Returns the arm's figures, its mismatches and what limits it missed."""
    arm, page = result["arm"], result["page"]
    profile, _, min_exact, max_error = ARMS[arm]
    told = [x for x in result["lines"] if x.get("cached_tok", -1) >= 0 and "predicted_tok" in x]
    off = [x for x in told if x["predicted_tok"] != x["cached_tok"]]
    errors = sorted(abs(x["predicted_tok"] - x["cached_tok"]) / x["in_tok"] for x in told)
    at = lambda q: errors[min(len(errors) - 1, int(q * len(errors)))] if errors else float("nan")
    prompt = sum(x["in_tok"] for x in told) or 1
    row = {
        "arm": arm, "requests": len(result["lines"]), "told": len(told), "seconds": round(result["took"], 1),
        "exact": 1 - len(off) / max(1, len(told)), "error_mean": sum(errors) / max(1, len(errors)),
        "error_p50": at(0.5), "error_p90": at(0.9), "error_p99": at(0.99), "error_max": at(1),
        "too_much": sum(x["predicted_tok"] > x["cached_tok"] for x in off), "too_little": sum(x["predicted_tok"] < x["cached_tok"] for x in off),
        "predicted": sum(x["predicted_tok"] for x in told) / prompt, "cached": sum(x["cached_tok"] for x in told) / prompt,
        "per_replica": dict(collections.Counter(x["replica"] for x in told)), "in_flight": result["in_flight"],
    }
    missed = []
    if len(told) < args.requests:
        missed.append(f"{args.requests - len(told)} answers did not tell cached tokens: --enable-prompt-tokens-details?")
    if result["in_flight"]:
        missed.append(f"{result['in_flight']} requests in flight at the end, want 0")
    if len(row["per_replica"]) < len(args.replica):
        missed.append("a replica got nothing")
    if profile == "precise":
        row["evicted_blocks"] = int(sum_of(page, 'kvgate_kv_updates_total{op="remove"'))
        row["sources"] = {m[1]: int(float(m[2])) for m in re.finditer(r'kvgate_token_sources_total\{source="(\w+)"\} (\S+)', page) if float(m[2])}
        if not row["evicted_blocks"]:
            missed.append("nothing was evicted: start vLLM with fewer blocks")
        if sum_of(page, "kvgate_kv_incomplete"):
            missed.append("events were lost")
    if min_exact and row["exact"] < args.min_exact:
        missed.append(f"exact {row['exact']:.1%}, want {args.min_exact:.0%}")
    if max_error and row["error_mean"] > args.max_error:
        missed.append(f"mean error {row['error_mean']:.1%}, want at most {args.max_error:.0%}")
    return row, off, missed


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kvgate", default="./kvgate", help="the binary")
    p.add_argument("--replica", action="append", required=True, help="a vLLM replica; repeat")
    p.add_argument("--model", required=True)
    p.add_argument("--lora", default="", help="an adapter that the replicas serve")
    p.add_argument("--arms", default=",".join(ARMS), help="which of %(default)s")
    p.add_argument("--requests", type=int, default=200)
    p.add_argument("--concurrency", type=int, default=16)
    p.add_argument("--gap", type=float, default=0.1, help="seconds between two requests of an arm that sends one at a time")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--head", type=int, default=1, help="how long the heads of conversations are: the default makes prompts of about 500 tokens, 2 of about 900")
    p.add_argument("--block-tokens", type=int, default=16, help="blockSizeTokens of the precise producer")
    p.add_argument("--min-exact", type=float, default=0.99)
    p.add_argument("--max-error", type=float, default=0.05, help="mean |predicted - cached| as a part of the prompt")
    p.add_argument("--mismatches", type=int, default=10, help="how many to print of each arm")
    p.add_argument("--json", help="file for the figures")
    args = p.parse_args()
    rows, bad = [], []
    with tempfile.TemporaryDirectory() as tmp:
        for arm in args.arms.split(","):
            row, off, missed = judge(run(arm, args, tmp), args)
            rows.append(row)
            bad += [f"{arm}: {m}" for m in missed]
            for x in off[:args.mismatches]:
                print(f"  {x['request_id']}: {x['replica']}: {x['in_tok']} tokens, {x['predicted_tok']} predicted, {x['cached_tok']} cached", file=sys.stderr)
    print(f"{'arm':<17} {'requests':>8} {'exact':>6} {'mean':>6} {'p50':>6} {'p90':>6} {'p99':>6} {'max':>6} {'over':>5} {'under':>5} {'predicted':>9} {'cached':>7} {'in flight':>9} {'s':>6}")
    for r in rows:
        parts = " ".join(f"{r[k]:>6.1%}" for k in ("exact", "error_mean", "error_p50", "error_p90", "error_p99", "error_max"))
        print(f"{r['arm']:<17} {r['told']:>8} {parts} {r['too_much']:>5} {r['too_little']:>5} {r['predicted']:>9.1%} {r['cached']:>7.1%} {r['in_flight']:>9} {r['seconds']:>6}")
    for r in rows:
        more = {k: r[k] for k in ("evicted_blocks", "sources", "per_replica") if k in r}
        print(f"{r['arm']}: {json.dumps(more)}")
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=2)
    for line in bad:
        print("missed:", line)
    print("FAIL" if bad else "PASS")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
