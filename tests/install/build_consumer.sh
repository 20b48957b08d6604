#!/usr/bin/env bash
# build_consumer.sh find_package|find_package_c|pkg_config CMAKE BUILD_DIR CONSUMER_DIR WORK_DIR CC CXX
#
# Installs BUILD_DIR below WORK_DIR, moves the installed tree (nothing in it may name its place), builds the C and C++
# programs of CONSUMER_DIR against it and runs them; find_package_c is a project that knows no C++.
set -euo pipefail
way=$1 cmake=$2 build_dir=$3 consumer=$4 work=$5 cc=$6 cxx=$7

rm -rf "$work"
mkdir -p "$work"
"$cmake" --install "$build_dir" --prefix "$work/first" >"$work/install.log" || { cat "$work/install.log"; exit 1; }
mv "$work/first" "$work/prefix"
prefix=$work/prefix

pc=$(find "$prefix" -name attnfold.pc)
libdir=$(dirname "$(dirname "$pc")")
export LD_LIBRARY_PATH=$libdir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

for file in include/attnfold/attnfold.h include/attnfold/attnfold.hpp; do
  [ -f "$prefix/$file" ] || { echo "FAILED: $file was not installed"; exit 1; }
done

case $way in
  find_package | find_package_c)
    languages='C;CXX'
    if [ "$way" = find_package_c ]; then languages=C; fi
    "$cmake" -S "$consumer" -B "$work/build" -DCMAKE_PREFIX_PATH="$prefix" -DCONSUMER_LANGUAGES="$languages" \
      -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_BUILD_TYPE=Release
    "$cmake" --build "$work/build"
    c=$work/build/consumer_c cpp=$work/build/consumer_cpp
    if [ "$way" = find_package_c ]; then cpp=$c; fi
    ;;
  pkg_config)
    command -v pkg-config >/dev/null || { echo "FAILED: no pkg-config on this machine"; exit 1; }
    export PKG_CONFIG_PATH=$libdir/pkgconfig
    read -ra cflags <<<"$(pkg-config --cflags attnfold)"
    read -ra libs <<<"$(pkg-config --libs attnfold)"
    echo "cflags: ${cflags[*]}"
    echo "libs:   ${libs[*]}"
    c=$work/consumer_c cpp=$work/consumer_cpp
    "$cc" -std=c99 -Wall -Wextra -Werror "$consumer/consumer.c" "${cflags[@]}" "${libs[@]}" -o "$c"
    "$cxx" -std=c++20 -Wall -Wextra -Werror "$consumer/consumer.cpp" "${cflags[@]}" "${libs[@]}" -o "$cpp"
    ;;
  *) echo "way: expected find_package, find_package_c or pkg_config, got $way"; exit 2 ;;
esac
"$c"
"$cpp"

version=$(sed -n 's/^#define ATTNFOLD_VERSION_[A-Z]* //p' "$prefix/include/attnfold/attnfold.h" | paste -sd.)
grep -qx "Version: $version" "$pc" || { echo "FAILED: attnfold.pc: expected version $version"; exit 1; }
