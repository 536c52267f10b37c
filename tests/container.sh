#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build the image of contrib/Dockerfile from the last commit, on a bare trixie that debootstrap makes, and use it: an export, and a mount.
# As root, by hand; needs debootstrap, buildah and podman. Containers are buildah's with the isolation of a chroot, which work inside others.
set -euo pipefail
cd "$(dirname "$0")/.."
suite=trixie
chroots=${CKPTFS_CHROOTS:-/var/tmp/ckptfs-chroots}
tmp=$(mktemp -d)
name=ckptfs-test-$$
run=$PWD/tests/golden/nanotron/llama_tp2_pp2_tied
cleanup() {
  rm -rf --one-file-system "$tmp"
  buildah rm "$name" >/dev/null 2>&1 || true
  buildah rmi -f "$name" "$name-base" >/dev/null 2>&1 || true
}
trap cleanup EXIT

tests/chroot.sh "$suite" true
tar -C "$chroots/$suite" -c . | podman import -q - "$name-base" >/dev/null
git clone -q --no-hardlinks . "$tmp/source"
buildah build -q --isolation chroot --build-arg "BASE=localhost/$name-base" -f contrib/Dockerfile -t "$name" "$tmp/source"
buildah from --name "$name" "localhost/$name" >/dev/null

in_container() {
  buildah run --isolation chroot --cap-add CAP_SYS_ADMIN -v /dev/fuse:/dev/fuse -v "$run:/run/checkpoints:ro" -v "$run.expected:/expected:ro" \
    -v "$tmp:/out" "$name" -- "$@"
}
in_container ckpt export -q /run/checkpoints /out/model
cmp "$tmp/model/model.safetensors" "$run.expected/model.safetensors"
in_container sh -c 'ckptfs /run/checkpoints /mnt && cmp /mnt/latest/model.safetensors /expected/model.safetensors && umount /mnt'
echo 'the image is good'
