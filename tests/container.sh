#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build the image of contrib/Dockerfile from the last commit, on a bare trixie that debootstrap makes, and use it: export, and a mount that a
# second container sees. As root, by hand; needs debootstrap, buildah and podman.
set -euo pipefail
cd "$(dirname "$0")/.."
suite=trixie
chroots=${CKPTFS_CHROOTS:-/var/tmp/ckptfs-chroots}
tmp=$(mktemp -d)
name=ckptfs-test-$$
run=$PWD/tests/golden/nanotron/llama_tp2_pp2_tied
cleanup() {
  podman rm -f -t 1 "$name" >/dev/null 2>&1 || true
  ! mountpoint -q "$tmp/shared/run" || umount -l "$tmp/shared/run"
  ! mountpoint -q "$tmp/shared" || umount -l "$tmp/shared"
  rm -rf --one-file-system "$tmp"
  podman rmi -f "$name" "$name-base" >/dev/null 2>&1 || true
}
trap cleanup EXIT

tests/chroot.sh "$suite" true
tar -C "$chroots/$suite" -c . | podman import -q - "$name-base" >/dev/null
git clone -q --no-hardlinks . "$tmp/source"
buildah build -q --isolation chroot --build-arg "BASE=localhost/$name-base" -f contrib/Dockerfile -t "$name" "$tmp/source"

in_container() { podman run --rm --network none --ulimit host "$@"; }
in_container "$name" | grep -q '^usage' # the default command
in_container -v "$run:/run/checkpoints:ro" -v "$tmp:/out" "$name" ckpt export -q /run/checkpoints /out/model
cmp "$tmp/model/model.safetensors" "$run.expected/model.safetensors"

# A sidecar: one container mounts, another one, without any right, reads.
mkdir -p "$tmp/shared"
mount -t tmpfs none "$tmp/shared"
mount --make-shared "$tmp/shared"
mkdir "$tmp/shared/run"
podman run -d --name "$name" --network none --ulimit host --device /dev/fuse --cap-add SYS_ADMIN --security-opt apparmor=unconfined -v "$run:/run/checkpoints:ro" \
  -v "$tmp/shared:/shared:rshared" "$name" ckptfs -f -o allow_other /run/checkpoints /shared/run >/dev/null
for _ in {1..50}; do [[ ! -e $tmp/shared/run/latest ]] || break; sleep 0.2; done
in_container -v "$tmp/shared:/shared:ro,rslave" "$name" cmp /shared/run/latest/model.safetensors /shared/run/10/model.safetensors
in_container -v "$tmp/shared:/shared:ro,rslave" -v "$run.expected:/expected:ro" "$name" cmp /shared/run/latest/model.safetensors /expected/model.safetensors
echo 'the image is good'
