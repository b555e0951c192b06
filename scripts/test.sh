#!/usr/bin/env bash
# Checks the checkout: lint, format, types, tests, and the smoke demo. `--ci` runs the tests marked slow too.
# Usage: bash scripts/test.sh [--ci]
set -euo pipefail
cd "$(dirname "$0")/.."

MARKS="not slow"
case "${1:-}" in
  "") ;;
  --ci) MARKS="slow or not slow"; export HYPOTHESIS_PROFILE="${HYPOTHESIS_PROFILE:-ci}" ;;
  *) echo "test.sh: unknown argument $1 (expected nothing or --ci)" >&2; exit 2 ;;
esac

bash scripts/setup.sh
export OMP_NUM_THREADS=1
PYTHON=.venv/bin/python

stage() { printf '\n== %s (%d s so far)\n' "$1" "$SECONDS"; }

stage "ruff"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
stage "mypy"
.venv/bin/mypy
stage "smoke demo"
bash scripts/demo.sh --smoke
stage "pytest -m '$MARKS'"  # last, so that a reader of the log finds its count at the end
"$PYTHON" -m pytest -m "$MARKS" --durations=15
if [ "${1:-}" = --ci ]; then
  stage "mutants of reward, gating and objective: every one must be killed"
  "$PYTHON" scripts/mutants.py --jobs 2
fi
echo "test.sh: all checks passed in $SECONDS s"
