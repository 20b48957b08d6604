# shellcheck shell=bash
# Shared by ./run and ./test: steps, packages, builds.  Source it from the repository's root.

packages=(g++ cmake make pkg-config binutils python3 python3-dev python3-venv
          libgtest-dev librapidcheck-dev libbenchmark-dev libfmt-dev nlohmann-json3-dev libcli11-dev)

mkdir -p build
started=$(date +%s)

# step TEXT: says what is going on, and since when.
step() { printf '\n== [%4ds] %s\n' $(($(date +%s) - started)) "$*"; }

die() { printf '\nerror: %s\n' "$*" >&2; exit 1; }

# quietly LOG COMMAND..: output goes to LOG; of it, only how far a build has come is shown, and the end if it fails.
quietly() {
  local log=$1 last=-10 line percent
  shift
  "$@" </dev/null 2>&1 | while IFS= read -r line; do
    printf '%s\n' "$line" >&3
    if [[ $line =~ ^\[\ *([0-9]+)%\] ]]; then
      percent=${BASH_REMATCH[1]}
      if ((percent >= last + 10)); then
        printf '   [%3d%%] %4ds\n' "$percent" $(($(date +%s) - started))
        last=$percent
      fi
    fi
  done 3>"$log"
  local status=${PIPESTATUS[0]}
  if ((status != 0)); then
    tail -n 40 "$log"
    die "\"$*\" failed with exit status $status; all of its output is in $log"
  fi
}

# try_install PACKAGE..: installs what is missing, on Debian and its kin.  Elsewhere, or where it fails, $install_error says why.
try_install() {
  command -v dpkg-query >/dev/null && command -v apt-get >/dev/null || { install_error="no apt-get here"; return 1; }
  local missing=() p
  for p in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing+=("$p")
  done
  ((${#missing[@]})) || return 0
  step "Installing with apt-get: ${missing[*]}"
  local apt=(apt-get -q -y -o DPkg::Lock::Timeout=300)
  if ((EUID != 0)); then
    install_error="these packages are missing and this user may not install them; as root: apt-get install ${missing[*]}"
    command -v sudo >/dev/null || return 1
    if [ -t 0 ]; then
      sudo -v || return 1
    fi
    apt=(sudo -n env DEBIAN_FRONTEND=noninteractive "${apt[@]}")
  fi
  export DEBIAN_FRONTEND=noninteractive
  "${apt[@]}" update </dev/null >build/apt.log 2>&1 || echo "   apt-get update failed (build/apt.log); going on with the lists that are there"
  "${apt[@]}" install --no-install-recommends "${missing[@]}" </dev/null >>build/apt.log 2>&1 || {
    tail -n 15 build/apt.log
    install_error="apt-get could not install: ${missing[*]} (build/apt.log has the whole output)"
    return 1
  }
}

# Installs what every build needs; without apt-get CMake says what it misses.
install_packages() {
  command -v apt-get >/dev/null || return 0
  try_install "${packages[@]}" || die "$install_error"
}

# Jobs to build with: every CPU that this process may use, as long as each has about a GiB.
num_jobs() {
  local cpus gib
  cpus=$(nproc)
  gib=$(awk '/^MemAvailable:/ {print int($2 / 1048576)}' /proc/meminfo)
  ((gib >= 1)) || gib=1
  echo $((cpus < gib ? cpus : gib))
}

# build PRESET [TARGET..]: configures and builds it in build/PRESET.
build() {
  local preset=$1 jobs options=() targets=()
  shift
  (($#)) && targets=(--target "$@")
  jobs=$(num_jobs)
  if command -v ccache >/dev/null; then
    options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_C_COMPILER_LAUNCHER=ccache)
  fi
  # Warnings are errors where they are known to be none; another compiler may have new ones.
  if [ "$("${CXX:-c++}" -dumpversion 2>/dev/null | cut -d. -f1)" != 12 ]; then
    options+=(-DATTNFOLD_WERROR=OFF)
  fi
  step "Building $preset in build/$preset with $jobs jobs (log: build/$preset.log)"
  quietly "build/$preset-configure.log" cmake --preset "$preset" "${options[@]}"
  quietly "build/$preset.log" cmake --build "build/$preset" -j "$jobs" "${targets[@]}"
}
