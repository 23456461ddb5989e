#!/usr/bin/env bash
# make peers: one virtual environment of what respec is compared with, .peers/NAME, from benchmarks/peers/NAME.txt. Goes on where it stopped.
set -euo pipefail
name=$1
cd "$(dirname "$0")/../.."
home=.peers/$name list=benchmarks/peers/$name.txt log=.peers/$name.log
case $name in hf) module=trl ;; *) module=$name ;; esac
python=${PYTHON:-}
if [ -z "$python" ]; then
  if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "peers: '$python' is no Python 3.11 or later; name one: make peers PYTHON=/path/to/python3.11" >&2; exit 1
fi
mkdir -p .peers
free=$(df -Pk .peers | awk 'NR == 2 { print int($4 / 1048576) }')
if [ ! -e "$home/.installed" ] && [ "$free" -lt 6 ]; then
  echo "peers: $home needs up to 6 GiB of disk, $free GiB are free" >&2; exit 1
fi
if ! "$home/bin/python" -m pip --version >/dev/null 2>&1; then
  "$python" -m venv --clear "$home"
fi
echo "installing into $home, some minutes the first time (log: $log)"
if ! "$home/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-deps -r "$list" >"$log" 2>&1; then
  echo "peers: installing $list failed; the end of $log:" >&2; tail -n 15 "$log" >&2; exit 1
fi
if ! "$home/bin/python" -c "import $module" >>"$log" 2>&1; then
  echo "peers: $list is installed, but '$module' cannot be imported; the end of $log:" >&2; tail -n 15 "$log" >&2; exit 1
fi
touch "$home/.installed"
