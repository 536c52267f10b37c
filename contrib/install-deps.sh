#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install the packages that building ckptfs needs, with "tests" also those that the first tests need, with "all-tests" those of all.
# Packages that are installed already are left alone. Package names are those of Debian 12 and 13 and of Ubuntu 22.04 and 24.04; the names that carry a version (the
# compiler's sanitizer runtime) are derived from what the distribution offers.
set -euo pipefail

# libsodium is optional: without it CKPTFS_SECRET is an error; so are libcurl and expat: without them s3:// is one.
packages=(gcc cmake ninja-build pkg-config libfuse3-dev fuse3 libjansson-dev libxxhash-dev libyaml-dev libzstd-dev libpcre2-dev libsodium-dev
  libcurl4-openssl-dev libexpat1-dev)
if [[ ${1:-} == *tests ]]; then
  packages+=(g++ libcmocka-dev python3 python3-venv util-linux procps man-db strace xxhash)
fi
if [[ ${1:-} == all-tests ]]; then # python3-dev: what vLLM compiles includes Python.h
  packages+=(clang openmpi-bin libopenmpi-dev python3-dev rclone s3fs)
fi

is_installed() { [[ $(dpkg-query -W -f '${Status}' "$1" 2>/dev/null) == 'install ok installed' ]]; }
is_offered() { apt-cache show "$1" >/dev/null 2>&1; }

# The package of clang's sanitizer and fuzzer runtimes, for the clang that the package "clang" is. Older releases ship the
# runtimes with libclang-common-N-dev, which clang-N depends on: then nothing more is needed.
clang_runtime() {
  local version
  version=$(dpkg-query -W -f '${Depends}' clang 2>/dev/null || apt-cache show --no-all-versions clang 2>/dev/null | sed -n 's/^Depends: //p')
  version=$(grep -oE 'clang-[0-9]+' <<<"$version" | head -n 1)
  [[ -n $version ]] || return 0
  version=libclang-rt-${version#clang-}-dev
  if is_installed "$version" || is_offered "$version"; then echo "$version"; fi
}

find_missing() {
  local p
  missing=()
  for p in "${packages[@]}"; do
    is_installed "$p" || missing+=("$p")
  done
}

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "install-deps.sh knows Debian and Ubuntu only. Elsewhere, install the equivalents of: ${packages[*]}" >&2
  exit 1
fi
find_missing
runtime=
if [[ ${1:-} == all-tests ]] && is_installed clang; then
  runtime=$(clang_runtime)
  [[ -z $runtime ]] || is_installed "$runtime" || missing+=("$runtime")
fi
((${#missing[@]})) || exit 0

sudo=
if ((EUID)); then
  command -v sudo >/dev/null || { echo "install-deps.sh needs root (or sudo) to install: ${missing[*]}" >&2; exit 1; }
  sudo=sudo
fi
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -qq
if [[ ${1:-} == all-tests && -z $runtime ]]; then
  runtime=$(clang_runtime)
  [[ -z $runtime ]] || is_installed "$runtime" || missing+=("$runtime")
fi

unknown=()
for p in "${missing[@]}"; do
  is_offered "$p" || unknown+=("$p")
done
if ((${#unknown[@]})); then
  . /etc/os-release
  echo "install-deps.sh: ${PRETTY_NAME:-this system} offers no package named: ${unknown[*]}" >&2
  echo "Install what they provide by other means (or enable the repository that holds them), then run this script again." >&2
  exit 1
fi
$sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
