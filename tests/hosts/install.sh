#!/usr/bin/env bash
# Stands for `make install` on a test host, which reaches no registry: a virtual environment with the sent sources and
# the packages of this machine. install.sh PYTHON SITE_PACKAGES BIN
set -euo pipefail
python=$1 packages=$2 bin=$3
cd ~/kvrelay
"$python" -m venv --without-pip .venv
site=$(.venv/bin/python -c 'import site; print(site.getsitepackages()[0])')
printf '%s\n%s\n' "$PWD" "$packages" >"$site/kvrelay.pth" # in this order: sources before what is installed
for script in kvrelay ray; do
  sed "1s|.*|#!$PWD/.venv/bin/python|" "$bin/$script" >".venv/bin/$script"
  chmod +x ".venv/bin/$script"
done
