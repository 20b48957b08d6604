# Sourced by the tests of the command: `. expect.sh "$@"`.  $1 is the attnfold command, $2 the folder of recorded calls.
# Each line is a claim: expect CODE TEXT ARGUMENT..

set -u
attnfold=$1
data=$2
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
failures=0

# expect CODE TEXT ARGUMENT..: the command exits with CODE, and its output holds TEXT (a grep -E pattern).
expect() {
  local code=$1 text=$2 output status
  shift 2
  output=$("$attnfold" "$@" 2>&1 </dev/null)
  status=$?
  if [ "$status" -ne "$code" ]; then
    fail "attnfold $*: expected exit code $code, got $status" "$output"
  elif ! printf '%s\n' "$output" | grep -Eq -- "$text"; then
    fail "attnfold $*: expected output with '$text'" "$output"
  fi
}

fail() {
  failures=$((failures + 1))
  echo "FAILED: $1"
  printf '%s\n' "${2-}" | head -n 12 | sed 's/^/    /'
}

finish() {
  if [ "$failures" -eq 0 ]; then echo "all claims hold"; else echo "$failures claims failed"; fi
  exit $((failures > 0))
}

# header_bytes FILE: length of the JSON header of a safetensors file.
header_bytes() { od -An -t u8 -N 8 "$1" | tr -d ' '; }

# tensor_offset FILE NAME: where the tensor's bytes begin in the file.
tensor_offset() {
  local length start
  length=$(header_bytes "$1")
  start=$(head -c $((8 + length)) "$1" | tail -c "$length" |
    sed -E "s/.*\"$2\":\{[^}]*\"data_offsets\":\[([0-9]+),.*/\1/")
  echo $((8 + length + start))
}

# with_header FILE OUT SED_PROGRAM: a copy whose JSON header is edited.
with_header() {
  local length header i
  length=$(header_bytes "$1")
  header=$(head -c $((8 + length)) "$1" | tail -c "$length" | sed -E "$3")
  : >"$2"
  for i in 0 1 2 3 4 5 6 7; do
    # shellcheck disable=SC2059
    printf "\\$(printf %03o $((${#header} >> (8 * i) & 255)))" >>"$2"
  done
  printf '%s' "$header" >>"$2"
  tail -c +$((9 + length)) "$1" >>"$2"
}

# with_bytes FILE OUT OFFSET BYTES: a copy with BYTES (printf escapes) written at OFFSET.
with_bytes() {
  cp "$1" "$2"
  chmod u+w "$2"
  # shellcheck disable=SC2059
  printf "$4" | dd of="$2" bs=1 seek="$3" conv=notrunc status=none
}
