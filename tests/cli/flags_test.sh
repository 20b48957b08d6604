#!/usr/bin/env bash
# Flags that every subcommand refuses or answers in the same way.
. "$(dirname "$0")/expect.sh" "$@"
good=$data/verify_layer20.safetensors

expect 0 '^attnfold [0-9]+\.[0-9]+\.[0-9]+$' --version
expect 0 'Exit codes' --help
for sub in info run verify bench explain; do
  expect 0 'Exit codes' "$sub" --help
done
for line in info "run $good" "verify $good" bench explain; do
  # shellcheck disable=SC2086
  expect 2 '--frobnicate' $line --frobnicate
done
expect 2 'subcommand' ''
expect 2 '.' frobnicate
"$attnfold" >"$work/out" 2>&1
[ $? -eq 2 ] || fail "no subcommand: expected exit code 2" "$(cat "$work/out")"

for flag in --threads --workers --repeat; do
  for value in 0 -1 99999999999999999999 1.5 many ''; do
    expect 2 "$flag" run "$good" "$flag" "$value"
  done
done
expect 2 '--threads: expected 1..1024, got 1025' run "$good" --threads 1025
expect 2 '--schedules: expected 1..1000, got 0' verify "$good" --schedules 0
expect 2 '--seed' verify --case random --seed minus
expect 2 '--isa: expected one of .*scalar.*, got sse9' verify "$good" --isa sse9
expect 2 '--isa: expected one of .*scalar.*, got sse9' run "$good" --isa sse9
expect 2 '--isa: expected one of .*scalar.*, got sse9' bench --isa sse9
expect 2 '--backend: expected cpu or cuda, got tpu' verify "$good" --backend tpu
if "$attnfold" info | grep -q 'cuda/bf16.* yes '; then
  expect 0 'right' verify "$good" --backend cuda
else
  expect 2 'backend: expected one that this' verify "$good" --backend cuda
  expect 2 'backend: expected one that this' bench --backend cuda
fi
expect 2 '--json' bench --json "$work/no/such/folder/x.json"

ATTNFOLD_ISA=sse9 expect 2 'sse9' run "$good"
ATTNFOLD_ISA=sse9 expect 0 'none.*sse9' info
ATTNFOLD_ISA=scalar expect 0 '"isa": "scalar"' info --json
finish
