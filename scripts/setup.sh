#!/usr/bin/env bash
# Make the checkout ready: .venv with the tested versions, and a Chromium. Running it again takes a second.
#
# Works as root on a bare Debian or Ubuntu with python3.11+ (it installs python3-venv and a Chromium by apt),
# and as a normal user if those are installed.
#
#   PYTHON=python3.12 bash scripts/setup.sh   use that Python
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu bash scripts/setup.sh
#                                             take torch from that index, such as the CPU build's
#   UNPINNED=1 bash scripts/setup.sh          the ranges of requirements*.txt alone, if a pin is not available
#   RMSWEB_CHROMIUM=/path/to/chrome           use that browser
#   bash scripts/setup.sh --no-browser        leave Chromium out
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "setup: $*"; }

as_root() {  # run a command as root; fails if that needs a password
  if [ "$(id -u)" -eq 0 ]; then
    DEBIAN_FRONTEND=noninteractive "$@"
  else
    sudo -n env DEBIAN_FRONTEND=noninteractive "$@"
  fi
}

can_apt() { command -v apt-get >/dev/null && { [ "$(id -u)" -eq 0 ] || sudo -n true 2>/dev/null; }; }

apt_install() {
  [ -n "${APT_UPDATED:-}" ] || as_root apt-get update -qq
  APT_UPDATED=1
  as_root apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

find_python() {
  local name
  for name in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  return 1
}

# ---------------------------------------------------------------------------------------------------- Python
if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
  if ! python=$(find_python); then
    echo "setup: no Python 3.11 or newer (looked for ${PYTHON:-python3, python3.11 to python3.14})" >&2
    exit 3
  fi
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if ! can_apt; then
      echo "setup: $python lacks venv; install python$version-venv" >&2
      exit 3
    fi
    say "installing python$version-venv"
    apt_install "python$version-venv"
  fi
  say "making .venv with $("$python" --version)"
  rm -rf .venv
  "$python" -m venv .venv
fi

install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }

if [ -n "${UNPINNED:-}" ]; then
  pins=() torch=$(grep '^torch[>=]' requirements.txt)
else
  pins=(-c constraints.txt) torch=$(grep '^torch==' constraints.txt)
fi
hash=$(cat requirements.txt requirements-dev.txt constraints.txt <(echo "${UNPINNED:-}") | sha256sum)
stamp=".venv/installed-${hash:0:16}"
if [ ! -e "$stamp" ]; then
  if [ -n "${TORCH_INDEX:-}" ]; then
    say "installing torch from $TORCH_INDEX"
    install --index-url "$TORCH_INDEX" "$torch"  # without pins: its index has few versions of other packages
  fi
  say "installing the packages of requirements.txt and requirements-dev.txt"
  install -r requirements.txt -r requirements-dev.txt "${pins[@]}"
  # The tests read Qwen's vocabulary from a file of this package. Nothing imports it: no dependencies.
  install --no-deps dashscope "${pins[@]}" || say "no dashscope: tests with Qwen's vocabulary are skipped"
  touch "$stamp"
fi

# -------------------------------------------------------------------------------------------------- Chromium
find_chromium() {
  .venv/bin/python -c 'from rmsweb.browser.chromium import find_chromium; print(find_chromium())' 2>/dev/null
}

if [ "${1:-}" = --no-browser ]; then
  chromium="no Chromium asked for"
elif ! chromium=$(find_chromium); then
  if can_apt; then
    for package in chromium-headless-shell chromium; do
      say "installing $package by apt"
      if apt_install "$package" fonts-liberation && chromium=$(find_chromium); then break; fi
      chromium=""
    done
  fi
  if [ -z "${chromium:-}" ]; then  # Ubuntu has no Chromium package outside snap
    say "installing Playwright's headless shell"
    if can_apt; then
      as_root "$PWD/.venv/bin/python" -m playwright install-deps chromium-headless-shell >/dev/null
    fi
    .venv/bin/python -m playwright install chromium-headless-shell
    if ! chromium=$(find_chromium); then
      echo "setup: no Chromium found and none could be installed; set RMSWEB_CHROMIUM to one" >&2
      exit 3
    fi
  fi
fi
say "ready: $(.venv/bin/python --version), $chromium"
