#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every extern symbol of the static library begins with ckpt_; the shared ones export what the public headers mark CKPT_PUBLIC, no
# more and no less (the loader's contains the other), each in the version of its library: symbols.sh SOURCE_DIR STATIC SHARED LOADER
set -eu
source=$1 static=$2 shared=$3 loader=$4
bad=0

strange=$(nm -g --defined-only "$static" | awk 'NF == 3 { print $3 }' | grep -v '^ckpt_' |
    grep -Ev '^(__asan|__ubsan|__tsan|__odr_asan|_ZTI|__sanitizer)' | sort -u || true)
if [ -n "$strange" ]; then
    echo "symbols without ckpt_:" $strange
    bad=1
fi

promised=$(mktemp) exported=$(mktemp)
trap 'rm -f "$promised" "$exported"' EXIT

# compare LIBRARY VERSION HEADER...
compare() {
    library=$1 version=$2
    shift 2
    (cd "$source/include/ckptfs" && cat "$@") | tr '\n' ' ' | grep -o 'CKPT_PUBLIC [^;]*;' | grep -o 'ckpt_[a-z0-9_]*(' | awk '
        !seen[$0]++' | tr -d '(' | sed "s/$/@@$version/" | sort -u >"$promised"
    nm -D --defined-only --with-symbol-versions "$library" | awk 'NF == 3 && $2 != "A" { print $3 }' | grep -Ev '^(__asan|__ubsan|__tsan|__odr_asan|_init$|_fini$)' |
        sort -u >"$exported"
    if ! diff "$promised" "$exported"; then
        echo "($library: < promised by the headers, > exported)"
        bad=1
    fi
    [ -s "$promised" ] || { echo "the headers promise nothing?"; bad=1; }
}
compare "$shared" CKPTFS_0 err.h ckptfs.h
compare "$loader" CKPTFS_LOAD_0 err.h ckptfs.h load.h ../../core/comm/xport.h ../../core/comm/comm.h ../../core/comm/env.h # the last three for transports, which are libraries of their own
exit $bad
