#!/usr/bin/env python3
"""Compares two files that `attnfold bench --json` wrote: time ratios of equal rows, with their spread.

    bench/compare.py before.json after.json

A ratio below 1 means that `after` is faster.  Rows whose quartiles overlap are marked "~": no difference is shown.
Exits with 1 if a row of `after` is slower by more than --tolerance and its quartiles do not overlap.
"""

import argparse
import json
import sys

KEY = ("kind", "shape", "qo_heads", "kv_heads", "head_dim", "page_size", "dtype", "state")


def load(path):
    """The file's machine text, and its rows by what they measure."""
    with open(path, encoding="utf-8") as file:
        results = json.load(file)
    rows = {tuple(row.get(name) for name in KEY): row for row in results["rows"]}
    return f'{results["cpu"]}, {results["threads"]} threads, {results["version"]}', rows


def overlap(a, b):
    """Whether the quartile ranges of two rows meet."""
    return a["us_q1"] <= b["us_q3"] and b["us_q1"] <= a["us_q3"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--tolerance", type=float, default=0.05, help="slower by this share is an error (0.05)")
    arguments = parser.parse_args()
    try:
        (before_machine, before), (after_machine, after) = load(arguments.before), load(arguments.after)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"compare.py: expected two files of `attnfold bench --json`: {error}", file=sys.stderr)
        return 2
    print(f"before  {before_machine}\nafter   {after_machine}")
    if before_machine.split(",")[:2] != after_machine.split(",")[:2]:
        print("note: not the same machine")
    print(f'{"":42}{"before us":>12}{"after us":>12}{"ratio":>8}')
    slower = False
    for key, new in after.items():
        old = before.get(key)
        if old is None:
            continue
        ratio = new["us"] / old["us"]
        same = overlap(old, new)
        slower |= ratio > 1 + arguments.tolerance and not same
        name = "{} {} {}/{} {} {}".format(key[0], key[1], key[2], key[3], key[6], key[7] or "")
        print(f'{name:42}{old["us"]:12.1f}{new["us"]:12.1f}{ratio:8.3f}{" ~" if same else ""}')
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
