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
expect 2 'expected a subcommand .*got frobnicate' frobnicate
expect 2 'got frobnicate' frobnicate --threads 3
"$attnfold" >"$work/out" 2>&1
[ $? -eq 2 ] || fail "no subcommand: expected exit code 2" "$(cat "$work/out")"

for flag in --threads --workers --repeat; do
  for value in 0 -1 99999999999999999999 1.5 many ''; do
    expect 2 "$flag" run "$good" "$flag" "$value"
  done
done
expect 2 '--threads: expected 1..1024, got 1025' run "$good" --threads 1025
expect 2 '--schedules: expected 1..1000, got 0' verify "$good" --schedules 0

# Every number of every subcommand, as --help lists them: no sign, base or overflow is taken for another number.
numbers() {
  "$attnfold" "$1" --help |
    sed -nE 's/^ +(--[a-z0-9-]+) (N|N\[\/N\]|C|INT:[^ ]*|FLOAT:[^ =]*|LIST:[0-9][^ ]*)(=[^ ]*)?( .*)?$/\1 \2 \4/p'
}
for sub in run verify bench explain info; do
  case $sub in
    run) line="run $good" ;;
    verify) line="verify --case random" ;;
    *) line=$sub ;;
  esac
  count=0
  while read -r flag kind help; do
    count=$((count + 1))
    values='x nan 99999999999999999999x'
    case $kind in
      C | FLOAT*) values="$values inf" ;;
      N\[*) values="$values 1.5 99999999999999999999" ;;
      *) values="$values 1.5 010 +1 0x10 -0 99999999999999999999 -99999999999999999999" ;;
    esac
    case $help in *'-1 = off'*) values="$values -2" ;; *) values="$values -1" ;; esac
    case $help in *'--heads'*) more='--heads 8' ;; *) more= ;; esac
    for value in $values ''; do
      # The engine names a field of the problem, without the dashes.
      # shellcheck disable=SC2086
      expect 2 "${flag//-/[-_]?}.*got ?(${value//+/[+]}|-1.000000|inf|nan|)" $line $more "$flag" "$value"
    done
  done < <(numbers $sub)
  [ "$count" -gt 0 ] || fail "$sub: expected options with numbers in its --help, found none"
done
expect 2 '--seed: expected 0..18446744073709551615, got -1' verify --case random --seed -1
expect 0 'Seed 18446744073709551615' verify --case random --schedules 1 --seed 18446744073709551615
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
expect 2 '--against: expected .*attnfold, got .*/missing.so: ' bench --backend cuda --against "$work/missing.so"
libc=$(ldd "$attnfold" | sed -nE 's/.* (\/[^ ]*libc\.so[^ ]*) .*/\1/p')
expect 2 '--against: expected .*attnfold, got .*libc.*attnfold_plan_create' bench --backend cuda --against "$libc"
expect 2 '--against: expected with --backend cuda' bench --against "$libc"

# A shape that no table has, alone or in a list, before a device is asked for or a file is opened.
printf kept >"$work/kept.json"
for names in '' NOPE X1,NOPE NOPE,D1 M256,NOPE,X4-decodes D,NOPE d1,NOPE 16x8192,NOPE; do
  given=$(tr , '\n' <<<"$names" | grep -vxE 'X1|D1|M256|X4-decodes' | head -1)
  expect 2 "--shapes: expected some of D1, .*D4-dim256, M256, .*X1, .*X1-softcap, got $given\$" \
    bench --backend cuda --shapes "$names" --json "$work/kept.json"
done
for names in '' NOPE 2048,NOPE NOPE,2048 D1,NOPE; do
  given=$(tr , '\n' <<<"$names" | grep -vx 2048 | head -1)
  expect 2 "--shapes: expected some of 16x8192, .*512on8192, got $given\$" \
    bench --threads 1,2 --shapes "$names" --json "$work/kept.json"
done
[ "$(cat "$work/kept.json")" = kept ] || fail "bench with a wrong --shapes: expected --json's file as it was"
# One that is not in the form that other shapes have.
for name in '' NOPE 0x5 1x 7x0 7x7: 1x9::d64 1x9:d 1x9:d0 1x9:64/9 1x9:64/0 1x9:q4 1x9:page 2on1 1x9on3 99999x9; do
  expect 2 "--shapes: expected BATCHxKEYS .*got .* in $name\$" bench --shapes "$name" --json "$work/kept.json"
done
expect 2 '--shapes: .*got an empty part in $' bench --shapes 1x9,
expect 2 '--shapes: expected without --workers' bench --workers 2 --shapes 1x9
expect 2 '--svg: expected without --workers, --shapes' bench --svg "$work/a.svg" --shapes 1x9
[ "$(cat "$work/kept.json")" = kept ] || fail "bench with a wrong --shapes: expected --json's file as it was"
for list in '' 1,,2 ,1 1, 1,x 1,0; do
  expect 2 '--threads: expected 1..1024, got (0|x|)$' bench --threads "$list"
  expect 2 '--workers: expected 1..1024, got (0|x|)$' bench --workers "$list"
  expect 2 '--vllm-capture-sizes: expected 1..65536, got (0|x|)$' explain --vllm-capture-sizes "$list"
done
expect 2 '--shapes: expected some of 16x8192, .*got $' bench --threads 1,2 --shapes 2048,,2048
expect 2 '--against: expected .*got' bench --backend cuda --against ,
# What a sweep does not write is refused, before a file is opened.
for flags in '--workers 1,2 --json' '--workers 1,2 --svg' '--threads 1,2 --svg'; do
  # shellcheck disable=SC2086
  expect 2 "${flags##* }: expected without --workers" bench $flags "$work/kept.json"
done
expect 2 '--threads: expected one number beside --workers, got 1,2' bench --threads 1,2 --workers 1,2
[ "$(cat "$work/kept.json")" = kept ] || fail "bench with flags that exclude each other: expected the file as it was"
expect 2 '--svg: expected with --backend cpu' bench --backend cuda --svg "$work/x.svg"

ATTNFOLD_ISA=sse9 expect 2 'ATTNFOLD_ISA: expected one of .*, got sse9' run "$good"
ATTNFOLD_ISA=sse9 expect 0 'none.*sse9' info
ATTNFOLD_ISA=scalar expect 0 '"isa": "scalar"' info --json

# Nor is a number of threads that is none taken for another.
for threads in 0 -1 1025 many 2x ' 2' 99999999999999999999; do
  ATTNFOLD_NUM_THREADS=$threads expect 2 "ATTNFOLD_NUM_THREADS: expected 1..1024, got $threads\$" run "$good"
  ATTNFOLD_NUM_THREADS=$threads expect 2 "ATTNFOLD_NUM_THREADS: expected 1..1024, got $threads\$" bench
  ATTNFOLD_NUM_THREADS=$threads expect 0 'kv_gb_per_s' run "$good" --threads 2
done
ATTNFOLD_NUM_THREADS='' expect 0 'kv_gb_per_s' run "$good"

# An empty word is not one that was not given, and no message names the file twice.
for line in "run $good --isa" "run $good --out" "verify $good --isa" "bench --json" "bench --svg" "bench --isa" \
  "explain --html" "explain --book --with" explain info; do
  # shellcheck disable=SC2086
  expect 2 'expected a value, got' $line ''
done
for sub in run info explain; do
  said=$("$attnfold" $sub "$work/missing" 2>&1)
  [ "$(grep -o missing <<<"$said" | wc -l)" -eq 1 ] || fail "$sub of a missing file: expected its name once" "$said"
done
expect 2 '--matrix: expected nothing beside it, got a FILE' info --matrix "$good"
expect 2 '--matrix: expected nothing beside it, got problem flags' info --matrix --heads 8
expect 2 '--matrix: expected nothing beside it, got --json' info --matrix --json

# What is printed to a file that takes nothing is not lost in silence.
for line in "info" "info --json" "--version" "--help" "run $good" "verify $good" "explain" "explain --list --help"; do
  for to in full closed; do
    if [ "$to" = full ]; then
      # shellcheck disable=SC2086
      said=$("$attnfold" $line 2>&1 >/dev/full)
    else
      # shellcheck disable=SC2086
      said=$("$attnfold" $line 2>&1 >&-)
    fi
    status=$?
    if [ $status -ne 2 ] || ! grep -q '^attnfold: stdout: expected a file that can be written' <<<"$said"; then
      fail "attnfold $line, stdout $to: expected exit code 2 and why, got $status" "$said"
    fi
  done
done
"$attnfold" explain --json --html "$work/closed.html" >&- 2>/dev/null
if grep -q '"engine"' "$work/closed.html"; then fail "a closed stdout: expected nothing of it in --html's file"; fi
"$attnfold" run "$work/none" 2>/dev/full
[ $? -eq 2 ] || fail "a full stderr: expected exit code 2"

# An ISA that this machine lacks is named where it came from.
for isa in $("$attnfold" info | sed -nE 's/^cpu_[^ ]+ +([a-z0-9_]+) .* no +cpu-.*/\1/p' | sort -u); do
  ATTNFOLD_ISA=$isa expect 2 "ATTNFOLD_ISA: expected one that this machine runs, got $isa; " run "$good"
  ATTNFOLD_ISA=$isa expect 0 "none: ATTNFOLD_ISA: .*got $isa; " info
  expect 2 "--isa: $isa is not available here" run "$good" --isa "$isa"
done
finish
