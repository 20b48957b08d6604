#!/usr/bin/env python3
"""Times attnfold and its peers in turn on the same shapes; medians and quartiles as a table.

    compare_peers.py --attnfold PROGRAM [--ggml PROGRAM] [--vllm PYTHON] [--rounds N] [--threads N] [SHAPE ...]

PROGRAMs are built from peer_attnfold.cpp and peer_ggml.cpp (docs/performance-cpu.md has the commands); PYTHON is an
interpreter that has vLLM.  For each shape every peer is a process that waits until it is asked: round after round each
runs its call six times, of which the first three are not counted; twice where the cache is emptied before each.  All
have huge pages, by a switch of glibc's allocator.
A shape is NAME:BATCH:QO_LEN:KV_LEN:QO_HEADS:KV_HEADS:HEAD_DIM:DTYPE:warm|cold.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

SHAPES = [
    "decode:1:1:4096:32:8:128:bf16:warm",
    "decode:1:1:32768:32:8:128:bf16:warm",
    "decode:1:1:32768:32:8:128:bf16:cold",
    "decode:1:1:32768:64:8:128:bf16:warm",
    "decode:1:1:32768:64:8:128:bf16:cold",
    "decode:1:1:32768:8:8:128:bf16:cold",
    "decode:1:1:32768:9:3:64:bf16:warm",
    "decode:16:1:8192:32:8:128:bf16:warm",
    "decode:1:1:32768:32:8:128:f16:warm",
    "decode:1:1:32768:32:8:128:f16:cold",
    "prefill:1:2048:2048:32:8:128:bf16:warm",
    "prefill:1:512:8192:32:8:128:bf16:warm",
]


class Peer:
    """A process that runs its call when asked."""

    WARM_CALLS = 6

    def __init__(self, name, command):
        self.name, self.times = name, []
        environment = dict(os.environ, GLIBC_TUNABLES="glibc.malloc.hugetlb=1")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        self.ready = any(line.strip() == "ready" for line in iter(self.process.stdout.readline, ""))

    def ask(self, cold):
        self.process.stdin.write("run 2 cold\n" if cold else f"run {self.WARM_CALLS}\n")
        self.process.stdin.flush()
        times = [float(word) for word in self.process.stdout.readline().split()]
        self.times += times if cold else times[self.WARM_CALLS // 2:]

    def close(self):
        self.process.communicate("end\n")

    def quartiles(self):
        return statistics.quantiles(self.times, n=4)


def peers_of(options, fields):
    _, batch, qo_len, kv_len, qo_heads, kv_heads, head_dim, dtype, _ = fields
    call = [batch, qo_len, kv_len, qo_heads, kv_heads, head_dim, str(options.threads), dtype]
    commands = {"attnfold": [options.attnfold, *call]}
    if options.vllm and dtype == "bf16":
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peer_vllm.py")
        commands["vllm"] = [options.vllm, script, *call]
    if options.ggml:
        commands["ggml flash"] = [options.ggml, *call, "flash"]
        commands["ggml plain"] = [options.ggml, *call, "plain"]
    peers = [Peer(name, command) for name, command in commands.items()]
    for peer in peers:
        if not peer.ready:
            print(f"{peer.name}: {peer.process.stderr.read().strip()[-200:]}", file=sys.stderr)
    return [peer for peer in peers if peer.ready]


def work_of(fields):
    """KV bytes and floating-point operations on visible pairs."""
    batch, qo_len, kv_len, qo_heads, kv_heads, head_dim = (int(x) for x in fields[1:7])
    pairs = qo_len * kv_len - qo_len * (qo_len - 1) // 2
    return 4 * batch * kv_len * kv_heads * head_dim, 4 * batch * pairs * qo_heads * head_dim


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attnfold", required=True)
    parser.add_argument("--ggml")
    parser.add_argument("--vllm")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    options = parser.parse_args()
    results = []
    print("| call | heads | d | kv | state | peer | us (quartiles) | rate | its time over attnfold's |")
    print("|---|---|---|---|---|---|---|---|---|")
    for shape in options.shapes or SHAPES:
        fields = shape.split(":")
        peers = peers_of(options, fields)
        for _ in range(options.rounds):
            for peer in peers:
                peer.ask(fields[8] == "cold")
        for peer in peers:
            peer.close()
        kv_bytes, flop = work_of(fields)
        ours = peers[0].quartiles()[1]
        for peer in peers:
            low, median, high = peer.quartiles()
            rate = f"{kv_bytes / median / 1e3:.1f} GB/s" if fields[2] == "1" else f"{flop / median / 1e3:.0f} GFLOP/s"
            keys = fields[3] if fields[2] == "1" else f"{fields[2]} on {fields[3]}"
            print(f"| {fields[1]} x {keys} | {fields[4]}/{fields[5]} | {fields[6]} | {fields[7]} | {fields[8]} | "
                  f"{peer.name} | {median:.0f} ({low:.0f}..{high:.0f}) | {rate} | "
                  f"{'' if peer is peers[0] else f'{median / ours:.2f}'} |", flush=True)
            results.append({"shape": shape, "peer": peer.name, "us": median, "us_q1": low, "us_q3": high})
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
