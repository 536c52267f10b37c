#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Install into a new prefix, and build a small program against it by pkg-config and by find_package: install.sh BUILD_DIR CC SANITIZE
set -eu
build=$1 cc=$2 sanitize=$3
flags=${sanitize:+-fsanitize=$sanitize}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build" --prefix "$work/prefix" >"$work/log" || { cat "$work/log"; exit 1; }

cat >"$work/hello.c" <<'EOF'
#include <stdio.h>
#include <ckptfs/ckptfs.h>

int main(void)
{
    struct ckpt_run *run;
    struct ckpt_err err = {0};
    int result = ckpt_run_open("/nowhere", NULL, &run, &err);
    printf("%s %d %s\n", ckpt_version(), result, ckpt_code_name(err.code));
    return 0;
}
EOF
cat >"$work/CMakeLists.txt" <<'EOF'
cmake_minimum_required(VERSION 3.22)
project(hello LANGUAGES C)
find_package(ckptfs 0.3 REQUIRED)
add_executable(hello hello.c)
target_link_libraries(hello ckptfs::ckptfs)
add_executable(hello-static hello.c)
target_link_libraries(hello-static ckptfs::ckptfs-static)
EOF

pc=$(dirname "$(find "$work/prefix" -name ckptfs.pc)")
lib=$(dirname "$pc")
export PKG_CONFIG_PATH="$pc"
expect() {
    out=$("$@")
    [ "$out" = "$(pkg-config --modversion ckptfs) -1 missing" ] || { echo "$*: '$out'"; exit 1; }
}
# shellcheck disable=SC2046
$cc $flags "$work/hello.c" $(pkg-config --cflags --libs ckptfs) -o "$work/by-pkg-config"
expect env LD_LIBRARY_PATH="$lib" "$work/by-pkg-config"
# shellcheck disable=SC2046
$cc $flags "$work/hello.c" $(pkg-config --cflags ckptfs) "$lib/libckptfs.a" $(pkg-config --static --libs-only-l ckptfs | sed 's/-lckptfs//') \
    -o "$work/by-archive"
expect "$work/by-archive"
cmake -G Ninja -S "$work" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_C_COMPILER="$cc" -DCMAKE_C_FLAGS="$flags" >"$work/log" &&
    cmake --build "$work/build" >>"$work/log" || { cat "$work/log"; exit 1; }
expect "$work/build/hello"
expect "$work/build/hello-static"
echo "an installed library can be used"
