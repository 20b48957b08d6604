#!/usr/bin/env bash
# sanitize.sh CUDA_TESTS [EVERY_LANE_CUDA_TESTS [DROPPED_WAIT_CUDA_TESTS]]
#
# Runs 200 small calls (suite Cases/Sanitized) under compute-sanitizer: memcheck, initcheck and synccheck on the first
# program; racecheck on the second, built with -DATTNFOLD_EVERY_LANE_ARRIVES=ON, without which it reports a lane that arrives
# for its warp; and on the third, built with -DATTNFOLD_DROP_A_WAIT=ON too, where it must find something.  The tools run
# beside each other.  FILTER chooses other tests, LOGS a folder to keep the output in.  Exits with 77 where there is no compute-sanitizer or no device.
set -u
plain=$1 every_lane=${2-} dropped=${3-}
filter=${FILTER-Cases/Sanitized.*}
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
if [ -z "$sanitizer" ] || ! nvidia-smi -L >/dev/null 2>&1; then
  echo "SKIPPED: no compute-sanitizer, or no device"
  exit 77
fi
logs=${LOGS-$(mktemp -d)}
[ -n "${LOGS-}" ] || trap 'rm -rf "$logs"' EXIT

# check TOOL PROGRAM NAME FILTER
check() {
  "$sanitizer" --tool "$1" --error-exitcode 99 "$2" --gtest_filter="$4" >"$logs/$3" 2>&1
  echo $? >"$logs/$3.rc"
}
names=(memcheck initcheck synccheck)
for tool in memcheck initcheck synccheck; do
  check "$tool" "$plain" "$tool" "$filter" &
done
if [ -n "$every_lane" ]; then
  names+=(racecheck)
  check racecheck "$every_lane" racecheck "$filter" &
fi
[ -z "$dropped" ] || check racecheck "$dropped" dropped_wait "$filter" &
wait

status=0
for name in "${names[@]}"; do
  printf '%-13s exit %-3s %s\n' "$name" "$(cat "$logs/$name.rc")" "$(grep -E 'SUMMARY' "$logs/$name" | tail -1)"
  grep -E 'PASSED|FAILED|tests ran' "$logs/$name" | tail -3
  if [ "$(cat "$logs/$name.rc")" != 0 ]; then
    grep -m 20 -E '=========|Failure' "$logs/$name"
    status=1
  fi
done
if [ -n "$dropped" ]; then
  echo "dropped wait  exit $(cat "$logs/dropped_wait.rc") (99 is right) $(grep -E 'SUMMARY' "$logs/dropped_wait" | tail -1)"
  [ "$(cat "$logs/dropped_wait.rc")" = 99 ] || status=1
fi
exit $status
