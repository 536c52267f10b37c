#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What is run by hand before a release, and is too long for every change. As root; an hour or more on two processors.
#
#   tests/release.sh [STAGE ...]      all stages by default; a summary at the end, logs in build/release-logs
#
#   strict     tests/run.sh --strict
#   folders    a framework is a folder: what is left without one of them builds
#   chroots    README's two commands in bare bookworm and trixie
#   everything tests/run.sh --all in bare bookworm and trixie
#   packages   Debian packages and wheel: made, installed, used and removed in bare bookworm and trixie
#   container  the image of contrib/Dockerfile: made, an export and a mount in it (buildah)
#   arm64      cross build, unit tests under emulation
#   faults     the fault table twenty times over; re-saves under readers for ten minutes
#   ceiling    a model of 64 GiB served under a memory limit of 64 MiB
#   soak       daemons under saves and reads for $SOAK_HOURS hours (6): nothing grows
#   fuzz       every target for $SECONDS_EACH seconds (600)
#   classes    every class of transformers with a language model's head, and those that classify: in memory, with a config and with base=
#   saves      checkpoints that megatron-core saves out of its own modules
#   malloc     every allocation of the commands fails once
#   mutate     60 changes of one operator, constant or condition each: how many the tests notice (goes on where it ended)
set -uo pipefail
cd "$(dirname "$0")/.."
stages=("$@")
((${#stages[@]})) || stages=(strict folders chroots everything packages container arm64 faults ceiling soak fuzz classes saves malloc mutate)
logs=build/release-logs
mkdir -p "$logs"
build=$PWD/build/release
python=${CKPTFS_VENV:-$PWD/build/venv}/bin/python
summary=()

# stage NAME COMMAND...: run it, and note how it ended
stage() {
  local name=$1 begin=$SECONDS result=good
  shift
  echo "== $name: $*"
  "$@" >"$logs/$name.log" 2>&1 || result="FAILED (status $?)"
  summary+=("$(printf '%-18s %-20s %5d s' "$name" "$result" $((SECONDS - begin)))")
  echo "${summary[-1]}"
}

# mount_test NAME ARGS...: one of the mount's tests on the release build
mount_test() {
  (cd tests/mount && CKPTFS_BUILD=$build CKPTFS_SOURCE=$PWD/../.. "$python" -W ignore "$@")
}

for s in "${stages[@]}"; do
  case $s in
    strict) stage strict tests/run.sh --strict ;;
    folders) stage folders tests/delete_framework.sh ;;
    chroots) for suite in bookworm trixie; do stage "chroot-$suite" tests/chroot.sh "$suite"; done ;;
    everything) for suite in bookworm trixie; do stage "everything-$suite" tests/chroot.sh "$suite" 'tests/run.sh --all'; done ;;
    packages) for suite in bookworm trixie; do stage "packages-$suite" tests/chroot.sh "$suite" tests/packages.sh; done ;;
    container) stage container tests/container.sh ;;
    arm64) stage arm64 tests/chroot.sh trixie tests/arm64.sh ;;
    faults)
      CKPTFS_FAULTS=20 stage faults mount_test test_faults.py
      stage resave mount_test test_resave.py --seconds 600
      ;;
    ceiling) stage ceiling mount_test ceiling.py ;;
    soak) stage soak mount_test soak.py --hours "${SOAK_HOURS:-6}" --svg "$PWD/$logs/soak.svg" --json "$PWD/$logs/soak.json" ;;
    fuzz) stage fuzz tests/fuzz/run.sh "${SECONDS_EACH:-600}" ;;
    classes) stage classes env -C tests/interop CKPTFS_BUILD="$build" "$python" -W ignore test_classes.py all ;;
    saves)
      CKPTFS_BUILD=$build CKPTFS_SOURCE=$PWD CKPTFS_MEGATRON=$(find "$(dirname "$(dirname "$python")")" -maxdepth 1 -name 'megatron-core-*' | sort | paste -sd:) \
        stage saves "$python" tests/interop/megatron_saves.py
      ;;
    malloc) stage malloc "$python" tests/defects/test_malloc.py "$build/tests/fail_malloc.so" all ;;
    mutate) stage mutate tests/mutate.py ;;
    *) sed -n '3,21p' "$0" >&2; exit 2 ;;
  esac
done
printf '\n'
printf '%s\n' "${summary[@]}"
[[ ${summary[*]} != *FAILED* ]]
