#!/usr/bin/env python3
"""Compares the local tokenizer with a real vLLM: for requests of all shapes the tokens that `kvgate explain --tokens` shows
are those of POST /tokenize, and of the render paths where they are enabled.

    vllm serve MODEL_DIR --enable-scale-out --port 8100
    python3 bench/e2e/tokens.py --kvgate ./kvgate --model MODEL_DIR --vllm http://127.0.0.1:8100 --requests 300

Starts a gateway of its own in front of the replica, and asks it on its admin listener. Exits 1 when one request differs.
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


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--kvgate", required=True)
    p.add_argument("--model", required=True, help="folder with tokenizer.json")
    p.add_argument("--vllm", required=True)
    p.add_argument("--requests", type=int, default=300)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    with urllib.request.urlopen(a.vllm + "/v1/models", timeout=10) as r:
        model = json.load(r)["data"][0]["id"]
    with open(os.path.join(a.model, "tokenizer.json"), encoding="utf-8") as f:
        added = [t["content"] for t in json.load(f)["added_tokens"]]
    r = random.Random(a.seed)
    admin = f"127.0.0.1:{r.randint(20000, 30000)}"
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as f:
        f.write(f"""apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: token-producer
    parameters: {{local: {{tokenizer: {os.path.abspath(a.model)}/tokenizer.json}}}}
  - type: precise-prefix-cache-producer
    parameters:
      tokenProcessorConfig: {{blockSizeTokens: 32, hashAlgorithm: xxh64}}
  - type: prefix-cache-scorer
    parameters: {{prefixMatchInfoProducerName: precise-prefix-cache-producer}}
""")
    gate = subprocess.Popen([a.kvgate, "serve", "--scheduling", f.name, "--replica", a.vllm, "--listen", f"127.0.0.1:{r.randint(30001, 40000)}", "--admin-listen", admin, "--log-level", "error"])
    counts = {"equal": 0, "differ": 0, "refused by both": 0, "estimated here, answered there": 0, "local here, refused there": 0, "longer than the model": 0}
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://{admin}/readyz", timeout=5)
                break
            except OSError:
                time.sleep(0.1)
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
        os.unlink(f.name)
    print(model, counts)
    return 1 if counts["differ"] or counts["equal"] < a.requests // 2 else 0


if __name__ == "__main__":
    sys.exit(main())
