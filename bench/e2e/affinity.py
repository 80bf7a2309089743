#!/usr/bin/env python3
"""Drives conversations through kvgate with the official openai client and says
whether they stay on their replica, and what that saves.

    pip install openai
    kvgate serve --headers-replica --replica http://127.0.0.1:8100 --replica http://127.0.0.1:8101
    python3 bench/e2e/affinity.py --replica http://127.0.0.1:8100 --replica http://127.0.0.1:8101

Every conversation has a system prompt of its own; its turns follow each other,
streamed and plain in turn. With --baseline URL the same conversations (with other
words) go through a second gateway, say one with configs/scheduling-random.yaml,
and the uncached tokens are compared. Exits 1 when a limit is missed.
"""
import argparse
import collections
import concurrent.futures
import json
import random
import sys
import urllib.request

from openai import OpenAI

WORDS = """harbour ledger cotton signal orchard copper lantern meadow engine violet
granite whistle saddle compass anchor barley timber canyon ribbon kettle marble
falcon pepper drawer island thunder candle basket mirror garden window planet
bridge silver winter shadow letter castle forest summer spring hunter doctor
teacher sailor farmer driver singer writer painter builder carpenter""".split()


def words(rnd, n):
    return " ".join(rnd.choice(WORDS) for _ in range(n))


def counters(replicas):
    """Tokens looked up in, and found in, the prefix caches of all replicas."""
    queries = hits = 0.0
    for url in replicas:
        with urllib.request.urlopen(url + "/metrics", timeout=10) as page:
            for line in page.read().decode().splitlines():
                if line.startswith("vllm:prefix_cache_queries_total"):
                    queries += float(line.rsplit(" ", 1)[1])
                elif line.startswith("vllm:prefix_cache_hits_total"):
                    hits += float(line.rsplit(" ", 1)[1])
    return queries, hits


def converse(client, args, name, seed):
    rnd = random.Random(f"{name}-{seed}")
    messages = [{"role": "system", "content": words(rnd, args.system_words)}]
    served = []
    for turn in range(args.turns):
        messages.append({"role": "user", "content": words(rnd, 30)})
        kwargs = dict(model=args.model, messages=messages, max_tokens=args.max_tokens, temperature=0)
        if turn % 2:
            raw = client.chat.completions.with_raw_response.create(**kwargs)
            text = raw.parse().choices[0].message.content or ""
        else:
            raw = client.chat.completions.with_raw_response.create(stream=True, stream_options={"include_usage": True}, **kwargs)
            parts, usage = [], None
            for chunk in raw.parse():
                usage = chunk.usage or usage
                if chunk.choices and chunk.choices[0].delta.content:
                    parts.append(chunk.choices[0].delta.content)
            text = "".join(parts)
            if usage is None:
                raise RuntimeError("a stream ended without usage")
        served.append(raw.headers.get("x-kvgate-replica"))
        messages.append({"role": "assistant", "content": text})
    return served


def run(base, args, name):
    client = OpenAI(base_url=base + "/v1", api_key="none", max_retries=0, timeout=300)
    before = counters(args.replica)
    with concurrent.futures.ThreadPoolExecutor(args.concurrency) as pool:
        served = list(pool.map(lambda i: converse(client, args, name, i), range(args.conversations)))
    after = counters(args.replica)
    later = sticky = 0
    for replicas in served:
        if None in replicas:
            sys.exit("no x-kvgate-replica header: start kvgate with --headers-replica")
        for a, b in zip(replicas, replicas[1:]):
            later += 1
            sticky += a == b
    queries, hits = after[0] - before[0], after[1] - before[1]
    return {
        "name": name,
        "requests": sum(map(len, served)),
        "sticky": sticky / later,
        "per_replica": dict(collections.Counter(r for s in served for r in s)),
        "prompt_tokens": queries,
        "cached_tokens": hits,
        "uncached_tokens": queries - hits,
    }


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--base", default="http://127.0.0.1:8080", help="kvgate")
    p.add_argument("--baseline", help="a second kvgate, with another profile")
    p.add_argument("--replica", action="append", required=True, help="a vLLM replica, for its counters; repeat")
    p.add_argument("--model", default="smollm2")
    p.add_argument("--conversations", type=int, default=8)
    p.add_argument("--turns", type=int, default=6)
    p.add_argument("--concurrency", type=int, default=4)
    p.add_argument("--system-words", type=int, default=300)
    p.add_argument("--max-tokens", type=int, default=24)
    p.add_argument("--min-sticky", type=float, default=0.95)
    p.add_argument("--max-ratio", type=float, default=0.65, help="uncached tokens against the baseline's")
    args = p.parse_args()

    result = {"kvgate": run(args.base, args, "kvgate")}
    ok = result["kvgate"]["sticky"] >= args.min_sticky and len(result["kvgate"]["per_replica"]) == len(args.replica)
    if args.baseline:
        result["baseline"] = run(args.baseline, args, "baseline")
        result["ratio"] = result["kvgate"]["uncached_tokens"] / result["baseline"]["uncached_tokens"]
        ok = ok and result["ratio"] <= args.max_ratio
    result["ok"] = ok
    print(json.dumps(result, indent=2))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
