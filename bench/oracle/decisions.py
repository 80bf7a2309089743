#!/usr/bin/env python3
"""Writes routing/testdata/decisions.json: decisions computed from the published
rules of the scorers, independently of the Go code.

    python3 bench/oracle/decisions.py > routing/testdata/decisions.json
"""
import json
import random


def minmax(values, floor=0.0):
    known = [v for v in values if v is not None]
    if not known:
        return [None] * len(values)
    lo, hi = min(known), max(known)
    span = max(hi - lo, floor)
    return [None if v is None else (1.0 if span == 0 else 1.0 - (v - lo) / span) for v in values]


def neutral(scores):
    known = [s for s in scores if s is not None]
    mean = sum(known) / len(known) if known else 0.5
    return [mean if s is None else s for s in scores]


def queue(fleet, inline):
    loads, floor = [], 0.0
    for e in fleet:
        q = e["waiting"]
        if inline and e["awaiting"] > 0:
            floor = 8.0
            if q is not None:
                q = max(q, e["awaiting"])
        loads.append(q)
    scores = neutral(minmax(loads, floor))
    if floor:
        for i, e in enumerate(fleet):
            if e["waiting"] is None and e["awaiting"] > 0:
                scores[i] = min(scores[i], max(0.0, 1.0 - e["awaiting"] / floor))
    return scores


def scores(plugin, fleet, total):
    if plugin == "queue-scorer":
        return queue(fleet, True)
    if plugin == "queue-scraped":
        return queue(fleet, False)
    if plugin == "running-requests-size-scorer":
        return neutral(minmax([e["running"] for e in fleet]))
    if plugin == "kv-cache-utilization-scorer":
        return neutral([None if e["kv_usage"] is None else 1.0 - e["kv_usage"] for e in fleet])
    if plugin == "prefix-cache-scorer":
        return [e["match"] / total if total else 0.0 for e in fleet]
    if plugin == "prefix-long":  # matchLengthWeight 0.5, matchLengthScaleTokens 1024, blocks of 64
        return [0.5 * min(1.0, e["match"] * 64 / 1024) ** 2 + 0.5 * e["match"] / total if total else 0.0 for e in fleet]
    raise ValueError(plugin)


def main():
    rnd = random.Random(20260822)
    plugins = ["queue-scorer", "queue-scraped", "running-requests-size-scorer",
               "kv-cache-utilization-scorer", "prefix-cache-scorer", "prefix-long"]
    cases = []
    for _ in range(400):
        total = rnd.choice([0, 1, 2, 5, 20])
        fleet = []
        for i in range(rnd.randint(1, 9)):
            stale = rnd.random() < 0.15
            fleet.append({
                "name": f"e{i}",
                "waiting": None if stale else rnd.choice([0, 0, 1, 2, 7, 40]),
                "running": None if stale or rnd.random() < 0.1 else rnd.choice([0, 1, 3, 16]),
                "kv_usage": None if stale or rnd.random() < 0.1 else rnd.choice([0.0, 0.125, 0.5, 0.875, 1.0]),
                "awaiting": rnd.choice([0, 0, 0, 1, 3, 12]),
                "match": rnd.randint(0, total),
            })
        chosen = rnd.sample(plugins, rnd.randint(1, 4))
        profile = [{"plugin": p, "weight": rnd.choice([0.0, 1.0, 2.0, 3.0, 0.5])} for p in chosen]
        sums = [0.0] * len(fleet)
        for p in profile:
            for i, s in enumerate(scores(p["plugin"], fleet, total)):
                sums[i] += p["weight"] * min(max(s, 0.0), 1.0)
        best = max(sums)
        cases.append({"total": total, "fleet": fleet, "profile": profile, "totals": sums,
                      "winners": [e["name"] for e, s in zip(fleet, sums) if abs(s - best) < 1e-12]})
    print(json.dumps(cases, indent=None, separators=(",", ":")))


if __name__ == "__main__":
    main()
