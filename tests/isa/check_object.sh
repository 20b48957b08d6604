#!/usr/bin/env bash
# check_object.sh ISA OBJECTS NM OBJDUMP
#
# Of the object file of src/cpu/isa/ISA.cpp among OBJECTS (joined by colons):
#   - it defines no weak symbol.  The linker keeps one copy of a weak function for the whole program; if that copy came from
#     here, a baseline caller would run instructions that its machine may lack;
#   - it calls nothing but copies of memory and what the compiler adds by itself; scalar rows also fma;
#   - it holds the instruction that the ISA is named for, on that ISA's registers, and none of a wider one.
set -u
isa=$1 objects=$2 nm=$3 objdump=$4

fail() { echo "FAILED: $*"; status=1; }
status=0

object=
IFS=: read -ra all <<<"$objects"
for o in "${all[@]}"; do
  case $o in */isa/"$isa".cpp.o) object=$o ;; esac
done
[ -n "$object" ] && [ -s "$object" ] || { echo "FAILED: no object file of src/cpu/isa/$isa.cpp"; exit 1; }
echo "object: $object"

weak=$("$nm" -C --defined-only "$object" | awk '$2 ~ /^[WwVvu]$/')
[ -z "$weak" ] || fail "weak symbols:"$'\n'"$weak"

calls=$("$nm" -C --undefined-only "$object" | awk '{print $2}' | grep -vE '^(mem(cpy|set|move)|_.*)$')
[ "$isa" != scalar ] || calls=$(grep -vx fmaf <<<"$calls")
[ -z "$calls" ] || fail "calls:"$'\n'"$calls"

code=$("$objdump" -d --no-show-raw-insn "$object")
has() { local n; n=$(grep -cE "$1" <<<"$code"); echo "$n x $2"; [ "$n" -gt 0 ]; }
must() { has "$@" || fail "expected $2, found none"; }
must_not() { ! has "$@" || fail "expected no $2"; }

fma='vfn?m(add|sub)[0-9]+[ps]s'
case $isa in
  scalar)
    must_not '%[yz]mm' 'ymm or zmm register'
    must_not "$fma" 'fma instruction'
    ;;
  avx2)
    must "$fma.*%ymm" 'fma on ymm registers'
    must_not '%zmm|%k[1-7]' 'zmm or mask register'
    ;;
  avx512)
    must "$fma.*%zmm" 'fma on zmm registers'
    must_not 'vdpbf16ps' 'vdpbf16ps'
    ;;
  avx512_bf16)
    must 'vdpbf16ps.*%zmm' 'vdpbf16ps on zmm registers'
    ;;
  amx_bf16)
    must 'tdpbf16ps.*%tmm' 'tdpbf16ps on tiles'
    must_not 'vdpbf16ps' 'vdpbf16ps'
    ;;
  neon)
    must 'fmla\s+v[0-9]+\.4s' 'fma on four floats'
    must 'fcvtl2?\s+v[0-9]+\.4s' 'conversion of halves'
    must_not '\sz[0-9]+\.' 'SVE register'
    must_not '\sf(add|sub|mul|mla|mls|div)\s+v[0-9]+\.[48]h|fmlal|bfdot|bfmmla|bfmlal' 'arithmetic on 16 bits'
    must_not '\sfrecp|\sfrsqrt' 'estimate'
    ;;
  *) fail "ISA: expected scalar, avx2, avx512, avx512_bf16, amx_bf16 or neon, got $isa" ;;
esac
exit $status
