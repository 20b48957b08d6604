#!/usr/bin/env bash
# attnfold run and info: answers, exit codes and messages.
. "$(dirname "$0")/expect.sh" "$@"
good=$data/mixed_layer29.safetensors

expect 0 'num_units' run "$good" --repeat 2
expect 0 '"kernel": "cpu_scalar/' run "$good" --repeat 1 --isa scalar --json
expect 0 '"num_workers": 5' run "$good" --repeat 1 --workers 5 --json
shared=$data/shared_prefix_layer10.safetensors
expect 0 'num_prefix_groups +1 \(8 leaves read once\)' run "$shared" --repeat 1
expect 0 '"num_prefix_groups": 0' run "$shared" --repeat 1 --prefixes off --json
expect 2 'prefixes' run "$shared" --prefixes sometimes
expect 2 'missing' run "$work/missing"
expect 2 '.' run "$work"
head -c 1000 "$good" >"$work/short"
expect 2 'short' run "$work/short"
expect 2 'FILE' run
expect 2 '.' run "$good" --repeat 1 --out "$work/no/such/folder/o.safetensors"

# Workers cannot change a byte of what is written.
expect 0 'written' run "$good" --repeat 1 --workers 1 --out "$work/one.safetensors"
expect 0 'written' run "$good" --repeat 1 --workers 7 --out "$work/seven.safetensors"
cmp "$work/one.safetensors" "$work/seven.safetensors" || fail "1 and 7 workers wrote different files"


# Nor can shared prefixes.
for use in auto off always; do
  expect 0 'written' run "$shared" --repeat 1 --workers 3 --prefixes $use --out "$work/$use.safetensors"
  cmp "$work/auto.safetensors" "$work/$use.safetensors" || fail "--prefixes $use wrote another file"
done

expect 0 'numerics id' info
expect 0 '"kernels"' info --json
# A row that rounds weights is the default for some types of o alone: `info` says so where a plan takes one.
for row in $("$attnfold" info | sed -nE 's/^(cpu_[^ ]*_p16\/[^ ]+) .* yes +cpu-.*/\1/p'); do
  taken=0
  for o in bf16 e4m3; do
    "$attnfold" info --o $o | grep -q "^kernel  *$row" && taken=$((taken + 1))
  done
  if [ $taken -eq 2 ]; then
    "$attnfold" info --o f32 | grep -q "^kernel  *$row" && fail "info --o f32: expected another row than $row"
    "$attnfold" info | grep -A 1 "^$row" | grep -q 'default for o in bf16, e4m3 alone' || fail "info does not say for which o $row is"
    expect 0 '"default_for_o": "bf16, e4m3"' info --json
  fi
done
expect 0 'cpu_scalar/bf16.* yes' info "$good"
expect 0 'cpu_scalar/f16 .* no .*kv_dtype' info "$good"
expect 0 'cpu_scalar/f16 .* yes' info --kv f16 --q f32
expect 0 '576/512' info --head-dim 576/512 --heads 128/1
expect 0 '^\| kernel row' info --matrix
expect 2 'kv_heads: expected a divisor of qo_heads \(9\), got 2' info --heads 9/2
expect 2 'head_dim' info --head-dim 12
expect 2 'head_dim' info --head-dim 584
expect 2 '--q: expected one of f32, f16, bf16, got fp8' info --q fp8
expect 2 '--kv: expected one of .*e4m3, e5m2, i8, got fp8' info --kv fp8
expect 0 'kv e4m3, o e4m3, k scales per tensor' info --kv e4m3 --o e4m3
expect 0 'cpu_scalar/i8 .* yes' info --kv i8
expect 0 'v in k' info --head-dim 576/512 --heads 128/1 --v-in-k 1
expect 2 'head_dim_vo: expected at most head_dim_qk' info --head-dim 64/128 --v-in-k 1
expect 2 '--heads: .*got x' info --heads x
expect 2 '--heads: .*got 99999999999' info --heads 99999999999
expect 2 '--layout: expected NHD or HND, got BHSD' info --layout BHSD
expect 2 'page_size' info --page-size 0
expect 2 'got both' info "$good" --q f32
expect 2 'missing' info "$work/missing"
finish
