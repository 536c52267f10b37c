#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install the Debian packages that building (and with "tests", testing) needs; those that are there already are left alone.
set -euo pipefail

packages=(gcc cmake ninja-build pkg-config libfuse3-dev fuse3 libjansson-dev libxxhash-dev libyaml-dev libpcre2-dev
          liburing-dev)
if [[ ${1:-} == tests ]]; then
  packages+=(g++ clang clang-format libclang-rt-14-dev libcmocka-dev python3 python3-venv util-linux procps man-db
             openmpi-bin libopenmpi-dev strace)
fi

missing=()
for p in "${packages[@]}"; do
  [[ $(dpkg-query -W -f '${Status}' "$p" 2>/dev/null) == 'install ok installed' ]] || missing+=("$p")
done
((${#missing[@]})) || exit 0

sudo=
if ((EUID)); then
  command -v sudo >/dev/null || { echo "needs root (or sudo) to install: ${missing[*]}" >&2; exit 1; }
  sudo=sudo
fi
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -qq
$sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
