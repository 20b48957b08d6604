#!/usr/bin/env bash
# attnfold verify: what is right, wrong and cannot be judged, and the exit code of several.
. "$(dirname "$0")/expect.sh" "$@"
good=$data/verify_layer20.safetensors

expect 0 '135 .* right$' verify "$good"
expect 0 '"schedules": 5' verify "$good" --schedules 5 --json
expect 0 'right' verify "$good" --isa scalar --schedules 2
expect 0 '"kernel": "cpu_scalar/' verify "$good" --isa scalar --schedules 2 --json

# One recorded element of o is 48 in bf16, one lse is 48.
with_bytes "$good" "$work/wrong_o" $(($(tensor_offset "$good" o) + 128)) '\100\102'
with_bytes "$good" "$work/wrong_lse" $(($(tensor_offset "$good" lse) + 40)) '\000\000\100\102'
expect 1 'WRONG' verify "$work/wrong_o"
expect 1 'got 48' verify "$work/wrong_o"
expect 1 'got 48' verify "$work/wrong_lse"
expect 1 '"verdict": "WRONG"' verify --json "$work/wrong_o"

# Malformed: cut short, no file, no safetensors, a tensor too few, a tensor or key too many.
head -c 1000 "$good" >"$work/short"
printf 'not a safetensors file' >"$work/text"
: >"$work/empty"
printf '\377\377\377\377\377\377\377\377{}' >"$work/huge_header"
with_header "$good" "$work/no_kv_len" 's/"kv_len"/"kv_lem"/'
with_header "$good" "$work/unknown_key" 's/"mask"/"bask"/'
with_header "$good" "$work/bad_scale" 's/"sm_scale":"[^"]*"/"sm_scale":"much"/'
with_bytes "$good" "$work/bad_length" "$(tensor_offset "$good" kv_len)" '\377\377\377\177'
with_bytes "$good" "$work/bad_page" "$(tensor_offset "$good" block_table)" '\377\377\377\177'
for name in short text empty huge_header unknown_key bad_scale missing_file; do
  expect 2 'cannot be judged' verify "$work/$name"
done
expect 2 'kv_le[nm]' verify "$work/no_kv_len"
expect 2 'sm_scale' verify "$work/bad_scale"
expect 2 'kv_len' verify "$work/bad_length"
expect 2 'block_table' verify "$work/bad_page"
expect 2 'missing_file' verify "$work/missing_file"
expect 2 '.' verify "$work"

# Well-formed, but of a feature that is not served.
with_header "$good" "$work/newer" 's/attnfold-call-1/attnfold-call-2/'
expect 2 'attnfold-call-2' verify "$work/newer"
expect 2 'attnfold-call-2' run "$work/newer"
expect 2 'attnfold-call-2' info "$work/newer"

# Of several: wrong before cannot be judged before right; each has its line.
expect 2 'right$' verify "$good" "$work/short"
expect 1 'cannot be judged' verify "$work/wrong_o" "$work/short" "$good"
expect 1 'WRONG' verify "$work/short" "$work/wrong_o"

# What went wrong with a recorded answer.
expect 0 'right: ' verify --diagnose "$good"
expect 1 'none of these' verify --diagnose "$work/wrong_o"
expect 1 '"wrong_rows": 1' verify --diagnose --json "$work/wrong_lse"
expect 2 'cannot be judged' verify --diagnose "$work/short"
expect 2 'expected files' verify --diagnose --case random "$good"

# Cases.
expect 0 'long_decode_20000' verify --list-cases
expect 0 'random.*right$' verify --case random --seed 5 --schedules 3
expect 0 'Seed 5' verify --case random --seed 5 --schedules 1
expect 0 'case merge_pair.*right$' verify --case merge_pair_both_empty --case random --schedules 1 "$good"
expect 2 'no_such_case' verify --case no_such_case
expect 2 'neither' verify
finish
