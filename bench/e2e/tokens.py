#!/usr/bin/env python3
"""Compares the local tokenizer with a real vLLM: for requests of all shapes the tokens that `kvgate explain --tokens` shows
are those of POST /tokenize, and of the render paths where they are enabled.

    vllm serve MODEL_DIR --enable-scale-out --port 8100
    python3 bench/e2e/tokens.py --kvgate ./kvgate --model MODEL_DIR --vllm http://127.0.0.1:8100 --requests 300 --predict 60

Starts a gateway of its own in front of the replica, and asks it on its admin listener. With --predict it then sends so many turns of conversations through a
gateway with `local` and one with `vllm`, and compares what the precise producer predicted with the cached tokens that the answers tell (vLLM needs
--kv-events-config and --enable-prompt-tokens-details). Exits 1 when one request differs, or a prediction of `local` is further off.
"""
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "oracle"))
import tokenizer as oracle  # noqa: E402


def post(url, body):
    data = json.dumps(body).encode()
    req = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(req, timeout=60) as r:
            return r.status, json.load(r)
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode(errors="replace")


def chat_body(r, model):
    messages, kw = oracle.chat(r)
    for m in messages:
        for c in m.get("tool_calls") or []:
            if not isinstance(c["function"]["arguments"], str):
                c["function"]["arguments"] = json.dumps(c["function"]["arguments"], ensure_ascii=r.random() < 0.5)
        m.pop("thinking", None)
        if m["role"] == "tool":
            m.pop("name", None)
        if m["role"] == "system" and r.random() < 0.1:
            m["content"] = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;\nrest"}, {"type": "text", "text": "more"}]
        if m["role"] == "user" and r.random() < 0.05:
            m["content"] = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]
    body = {"model": model, "messages": messages}
    if kw.pop("continue_final_message", False):
        body["continue_final_message"], body["add_generation_prompt"] = True, False
    elif not kw.pop("add_generation_prompt", True):
        body["add_generation_prompt"] = False
    for k in ("tools", "documents", "reasoning_effort"):
        if k in kw:
            body[k] = kw.pop(k)
    if kw:
        body["chat_template_kwargs"] = {k: v for k, v in kw.items()}
    if "tools" in body:
        body["tool_choice"] = "none"
    if r.random() < 0.1:
        body["add_special_tokens"] = True
    return body


def completion_body(r, model, added):
    body = {"model": model, "prompt": oracle.text(r, added).decode("utf-8", "replace")[:3000] or "x"}
    if r.random() < 0.2:
        body["prompt"] = [body["prompt"], oracle.text(r, added).decode("utf-8", "replace")[:500] or "y"]
    if r.random() < 0.2:
        body["add_special_tokens"] = False
    return body


def gateway(a, r, tokens):
    """Starts a gateway and waits until it is ready: its process, its data and its admin address, its configuration."""
    admin, data = f"127.0.0.1:{r.randint(20000, 30000)}", f"127.0.0.1:{r.randint(30001, 40000)}"
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as f:
        f.write(f"""apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: token-producer
    parameters: {{{tokens}}}
  - type: precise-prefix-cache-producer
    parameters:
      tokenProcessorConfig: {{blockSizeTokens: {a.block}, hashAlgorithm: xxh64}}
  - type: prefix-cache-scorer
    parameters: {{prefixMatchInfoProducerName: precise-prefix-cache-producer}}
""")
    gate = subprocess.Popen([a.kvgate, "serve", "--scheduling", f.name, "--replica", a.vllm, "--listen", data, "--admin-listen", admin, "--log-level", "error"])
    for _ in range(100):
        try:
            urllib.request.urlopen(f"http://{admin}/readyz", timeout=5)
            return gate, data, admin, f.name
        except OSError:
            time.sleep(0.1)
    sys.exit("the gateway does not become ready")


def predict(a, model, tokens):
    """Sends conversations; returns requests, prompt, predicted, cached and wrong tokens as the gateway counts them, and its token sources."""
    r = random.Random(a.seed + 7)
    gate, data, admin, config = gateway(a, r, tokens)
    try:
        time.sleep(3)  # the replay of the engine's events
        sent = 0
        while sent < a.predict:
            messages = [{"role": "system", "content": f"{tokens[:5]} {r.random()} " + " ".join(r.choice(oracle.WORDS) for _ in range(60))}]
            for _ in range(4):
                messages.append({"role": "user", "content": " ".join(r.choice(oracle.WORDS) for _ in range(30))})
                status, got = post(f"http://{data}/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 8, "ignore_eos": True, "temperature": 0})
                if status != 200:
                    sys.exit(f"chat: {status} {got}")
                messages.append({"role": "assistant", "content": got["choices"][0]["message"]["content"] or "x"})
                sent += 1
                time.sleep(0.2)  # the events of this answer
        with urllib.request.urlopen(f"http://{admin}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
    finally:
        gate.terminate()
        gate.wait(10)
        os.unlink(config)

    def value(name):
        return sum(int(float(x.rsplit(" ", 1)[1])) for x in lines if x.startswith(f"kvgate_prediction_{name}_tokens_total{{"))

    sources = {x.split('"')[1]: int(float(x.rsplit(" ", 1)[1])) for x in lines if x.startswith("kvgate_token_sources_total{") and not x.endswith(" 0")}
    return {"requests": sent, **{k: value(k) for k in ("prompt", "predicted", "cached", "error")}, "sources": sources}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--kvgate", required=True)
    p.add_argument("--model", required=True, help="folder with tokenizer.json")
    p.add_argument("--vllm", required=True)
    p.add_argument("--requests", type=int, default=300)
    p.add_argument("--predict", type=int, default=0, help="turns of conversations to send")
    p.add_argument("--block", type=int, default=32, help="tokens per block of the engine")
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    with urllib.request.urlopen(a.vllm + "/v1/models", timeout=10) as r:
        model = json.load(r)["data"][0]["id"]
    with open(os.path.join(a.model, "tokenizer.json"), encoding="utf-8") as f:
        added = [t["content"] for t in json.load(f)["added_tokens"]]
    r = random.Random(a.seed)
    gate, _, admin, config = gateway(a, r, f"local: {{tokenizer: {os.path.abspath(a.model)}/tokenizer.json}}")
    counts = {"equal": 0, "differ": 0, "refused by both": 0, "estimated here, answered there": 0, "local here, refused there": 0, "longer than the model": 0}
    try:
        for i in range(a.requests):
            chat = i % 2 == 0
            body = chat_body(r, model) if chat else completion_body(r, model, added)
            path = "/v1/chat/completions" if chat else "/v1/completions"
            status, ex = post(f"http://{admin}/debug/explain?tokens=1&path={path}", body)
            if status != 200:
                sys.exit(f"explain: {status} {ex}")
            local = [[t["id"] for b in q["blocks"] for t in b["tokens"]] for q in ex.get("prompts") or []] if ex["tokens"] == "local" else None
            # The render path takes every field; /tokenize not all of them.
            want = None
            status, got = post(a.vllm + path + "/render", body)
            if status == 200:
                want = [got["token_ids"]] if isinstance(got, dict) else [x["token_ids"] for x in got]
            if not set(body) & {"documents", "reasoning_effort", "tool_choice"} and not isinstance(body.get("prompt"), list):
                status2, told = post(a.vllm + "/tokenize", body)
                if status2 == 200:
                    if want is not None and want != [told["tokens"]]:
                        print("render and /tokenize differ", json.dumps(body)[:300])
                    want = [told["tokens"]]
            if want is None and isinstance(got, str) and "maximum context length" in got:
                what = "longer than the model"
            elif want is None:
                what = "refused by both" if local is None else "local here, refused there"
            elif local is None:
                what = "estimated here, answered there"
            else:
                what = "equal" if local == want else "differ"
            counts[what] += 1
            if what in ("differ", "estimated here, answered there", "local here, refused there"):
                print(what, ex["tokens"], json.dumps(body)[:600], "\n  got ", str(local)[:300], "\n  want", str(want)[:300] if want else str(got)[:300])
    finally:
        gate.terminate()
        gate.wait(10)
        os.unlink(config)
    print(model, counts)
    bad = counts["differ"] or counts["equal"] < a.requests // 2
    if a.predict:
        local = predict(a, model, f"local: {{tokenizer: {os.path.abspath(a.model)}/tokenizer.json}}")
        asked = predict(a, model, "vllm: {}")
        print("local", local)
        print("vllm ", asked)
        bad = bad or local["error"] > asked["error"] or not local["cached"]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
