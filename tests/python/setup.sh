#!/usr/bin/env bash
# setup.sh PYTHON CMAKE SOURCE_DIR BUILD_DIR WORK_DIR [SUITE]
#
# Makes WORK_DIR/venv-SUITE with what requirements-SUITE.txt names and with attnfold, installed by `pip install .` on top
# of the library that BUILD_DIR has built; suite `source` lets pip build the library too, without CUDA, `source_cuda` with
# it as pip does by itself where nvcc is found.  Packages come from the
# registry that pip is set up for, through uv, which keeps what it downloaded.  ATTNFOLD_SANITIZE: what the library was
# built with; LD_PRELOAD then has to be set wherever attnfold is imported.
set -euo pipefail
python=$1 cmake=$2 source=$3 build=$4 work=$5 suite=${6-default}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$work/venv-$suite

mkdir -p "$work"
if [ ! -x "$work/uv/bin/uv" ]; then
  "$python" -m venv --clear "$work/uv"
  "$work/uv/bin/pip" install --quiet uv
fi
uv=$work/uv/bin/uv
[ -x "$venv/bin/python" ] || "$uv" venv --quiet --python "$python" "$venv"
install=("$uv" pip install --quiet --python "$venv/bin/python")
override=$here/requirements-$suite-override.txt
[ -f "$override" ] || override=/dev/null
"${install[@]}" --override "$override" -r "$here/requirements-$suite.txt"
if [ -f "$here/requirements-$suite-alone.txt" ]; then
  "${install[@]}" --no-deps -r "$here/requirements-$suite-alone.txt"
fi

settings=(--config-setting "build-dir=$work/module-$suite")
case $suite in
  source) settings+=(--config-setting "cmake.define.ATTNFOLD_CUDA=OFF") ;;
  source_cuda) ;;
  *)
    "$cmake" --install "$build" --prefix "$work/prefix" >"$work/install.log" || { cat "$work/install.log"; exit 1; }
    settings+=(--config-setting "cmake.define.attnfold_ROOT=$work/prefix")
    ;;
esac
if [ -n "${ATTNFOLD_SANITIZE-}" ]; then
  settings+=(--config-setting "cmake.define.ATTNFOLD_SANITIZE=$ATTNFOLD_SANITIZE")
fi
"${install[@]}" --reinstall-package attnfold "${settings[@]}" "$source"
cd "$work"
[ -n "${ATTNFOLD_SANITIZE-}" ] || "$venv/bin/python" -c 'import attnfold; print("attnfold", attnfold.__version__, attnfold.__file__)'
