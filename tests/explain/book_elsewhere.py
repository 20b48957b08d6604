"""Evaluates the formulas of book.csv at other lengths, heads and widths, and compares the command's
answers with them.

usage: book_elsewhere.py ATTNFOLD BOOK_CSV [SEED [ROUNDS]]

Knows nothing of the command but `explain --book --with NAME=NUMBER,.. --json`: the formulas stand in
the table, and python evaluates them.  The command's own printed formulas are evaluated too.
"""
import csv
import json
import math
import random
import subprocess
import sys

NAMES = {"ceil": math.ceil, "floor": math.floor, "sqrt": math.sqrt, "ln": math.log,
         "log2": math.log2, "exp": math.exp, "min": min, "max": max}

# What each input may become; inputs that belong together are drawn together below.
REALS = {"bw": lambda r: r.uniform(0.1, 9) * 1e12, "peak": lambda r: r.uniform(10, 3000) * 1e12,
         "ridge": lambda r: r.uniform(10, 600), "N": lambda r: float(r.randint(16, 10**6)),
         "x": lambda r: r.uniform(-80, 120), "m_old": lambda r: r.uniform(-9, 9),
         "m_new": lambda r: r.uniform(9, 18), "sigma": lambda r: r.uniform(0.1, 9),
         "weights_gb": lambda r: r.uniform(1, 800), "fp16_max": lambda r: r.uniform(1e3, 1e9),
         "half_ulp": lambda r: float(r.randint(1, 64))}
COUNTS = {"d": lambda r: 128 * r.randint(1, 4), "T": lambda r: r.randint(1, 70000),
          "T2": lambda r: r.randint(1, 70000), "s": lambda r: r.randint(1, 200000),
          "b": lambda r: r.choice([1, 2, 4]), "B": lambda r: r.randint(1, 300),
          "layers": lambda r: r.randint(1, 130), "N_SM": lambda r: r.randint(1, 300),
          "segments": lambda r: r.randint(1, 64), "TILE": lambda r: r.choice([8, 16, 32, 64, 128]),
          "B_r": lambda r: r.randint(1, 256), "B_c": lambda r: r.randint(1, 256),
          "smem_kib": lambda r: r.randint(256, 1024), "mantissa": lambda r: r.randint(2, 52),
          "max_exponent": lambda r: r.randint(4, 127), "zero_exponent": lambda r: r.randint(8, 200),
          "subnormal_exponent": lambda r: r.randint(8, 200),
          "normal_exponent": lambda r: r.randint(8, 200), "scalar": lambda r: r.randint(0, 40),
          "load_bits": lambda r: r.choice([32, 64, 128, 256]), "tokens": lambda r: r.randint(1, 9999),
          "num_seqs": lambda r: r.randint(1, 300), "live": lambda r: r.randint(1, 16),
          "threshold": lambda r: r.randint(1, 128), "page": lambda r: r.choice([1, 2, 8, 16, 64, 100]),
          "min_grid_2d": lambda r: r.randint(1, 999), "BLOCK_H": lambda r: r.choice([4, 8, 16, 32]),
          "max_splits": lambda r: r.randint(1, 64), "tile": lambda r: r.randint(1, 9999),
          "partition": lambda r: r.randint(1, 2000), "segment": lambda r: r.randint(0, 15),
          "ids": lambda r: r.randint(1, 99), "last_id": lambda r: r.randint(0, 99),
          "kernels": lambda r: r.randint(1, 999), "v1": lambda r: r.randint(1, 999),
          "v2": lambda r: r.randint(1, 999)}


def draw(names, r):
    """New numbers for the inputs, such that whole-number formulas stay whole."""
    new = {}
    for name in names:
        if name in REALS:
            new[name] = REALS[name](r)
        elif name in COUNTS:
            new[name] = COUNTS[name](r)
    group = r.choice([1, 2, 3, 4, 5, 7, 8, 16, 71])
    if "h_kv" in names:
        new["h_kv"] = r.choice([1, 2, 3, 4, 8, 16])
    if "h" in names:
        new["h"] = group * new.get("h_kv", 1)
    if "g" in names:
        new["g"] = group
    if "BLOCK_M" in names:
        new["BLOCK_M"] = max(16, 2 ** math.ceil(math.log2(group)))
    if "h_total" in names or "h_kv_total" in names:
        new["tp"] = r.choice([1, 2, 4, 8])
        for name in ("h_total", "h_kv_total"):
            if name in names:
                new[name] = new["tp"] * r.randint(1, 16)
    if "block" in names and "kernel_block" in names:
        new["kernel_block"] = r.choice([8, 16, 32])
        new["block"] = new["kernel_block"] * r.randint(1, 16)
    elif "block" in names:
        new["block"] = r.choice([16, 64, 100, 128])
    return new


def evaluate(formula, inputs):
    # fractions of integers stay exact as long as python divides once, which is what is compared
    return eval(formula, {"__builtins__": {}}, {**NAMES, **inputs})  # the formulas are this repository's


def main():
    command, table = sys.argv[1:3]
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else random.randrange(10**9)
    rounds = int(sys.argv[4]) if len(sys.argv) > 4 else 3
    r = random.Random(seed)
    with open(table, newline="") as f:
        rows = list(csv.DictReader(f))
    # One representative of each formula and set of inputs.
    kinds = {}
    for row in rows:
        names = tuple(sorted(part.split("=")[0] for part in row["inputs"].split(";")))
        kinds.setdefault((row["formula"], names), row)
    compared = failed = unmoved = 0
    for (formula, names), row in kinds.items():
        if not set(names) - {"pi"}:
            continue
        for _ in range(rounds):
            inputs = {k: float(v) if any(c in v for c in ".e") else int(v)
                      for k, v in (part.split("=") for part in row["inputs"].split(";"))}
            new = draw(names, r)
            unmoved += not new
            inputs.update(new)
            given = ",".join(f"{k}={v!r}" for k, v in inputs.items())
            result = subprocess.run([command, "explain", "--book", row["name"], "--with", given, "--json"],
                                    capture_output=True, text=True)
            if result.returncode != 0:
                print(f"{row['name']} at {given}: exit code {result.returncode}: {result.stderr.strip()}")
                failed += 1
                continue
            got = next(x for x in json.loads(result.stdout) if x["name"] == row["name"])
            for text in (formula, got["formula"]):
                want = evaluate(text, inputs)
                compared += 1
                if not math.isclose(got["value"], want, rel_tol=1e-11, abs_tol=1e-300):
                    print(f"{row['name']} at {given}: {text} is {want!r}, the command says {got['value']!r}")
                    failed += 1
    print(f"seed {seed}: {len(kinds)} formulas, {compared} comparisons, {failed} failures")
    if unmoved:
        print(f"{unmoved} rows had no input that could be changed")
    sys.exit(1 if failed or unmoved else 0)


main()
