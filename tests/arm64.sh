#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Cross-compile for arm64 and run the unit tests under qemu's user emulation. As root, by hand, on a Debian that may be changed:
# tests/chroot.sh trixie tests/arm64.sh (in qemu 7.2, which is bookworm's, programs with threads hang)
set -euo pipefail
cd "$(dirname "$0")/.."
export DEBIAN_FRONTEND=noninteractive
dpkg --add-architecture arm64
apt-get update -qq
apt-get install -y -qq --no-install-recommends cmake ninja-build pkg-config gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user \
  libfuse3-dev:arm64 libjansson-dev:arm64 libxxhash-dev:arm64 libyaml-dev:arm64 libzstd-dev:arm64 libpcre2-dev:arm64 libcmocka-dev:arm64 python3 >/dev/null
mkdir -p build
cat >build/arm64.cmake <<'EOF'
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH=/usr/lib/aarch64-linux-gnu:/lib/aarch64-linux-gnu)
set(ENV{PKG_CONFIG_LIBDIR} /usr/lib/aarch64-linux-gnu/pkgconfig:/usr/share/pkgconfig)
EOF
PKG_CONFIG_LIBDIR=/usr/lib/aarch64-linux-gnu/pkgconfig:/usr/share/pkgconfig \
  cmake -G Ninja -S . -B build/arm64 --toolchain "$PWD/build/arm64.cmake" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCKPTFS_TESTS=ON
cmake --build build/arm64
ctest --test-dir build/arm64 -R '^unit/' -j "$(nproc)" --timeout 1200 --output-on-failure
file build/arm64/fs/ckptfs 2>/dev/null || true
