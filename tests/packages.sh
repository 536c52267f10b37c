#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make the packages on this machine, install each kind, use it as a user would, and remove it again. As root, by hand, on a machine that
# may be changed: tests/chroot.sh SUITE tests/packages.sh
set -euo pipefail
cd "$(dirname "$0")/.."
export DEBIAN_FRONTEND=noninteractive OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
run=$PWD/tests/golden/nanotron/llama_tp2_pp2_tied
expected=$run.expected
tmp=$(mktemp -d)
trap 'for m in "$tmp"/mnt*; do ! mountpoint -q "$m" || umount "$m"; done; rm -rf "$tmp"' EXIT
say() { printf '\n== %s\n' "$*"; }

# What is installed under a name of ours; paths in /usr that other packages own are not ours.
leftovers() { find / -xdev \( -path "$PWD" -o -path "$tmp" -o -path /proc -o -path /sys -o -path /tmp -o -path /var/cache \) -prune -o -name '*ckpt*' -print; }

# Mount, export and load with the programs that PATH finds.
use() {
  ckptfs -V
  mkdir -p "$tmp/mnt"
  ckptfs "$run" "$tmp/mnt"
  cmp "$tmp/mnt/latest/model.safetensors" "$expected/model.safetensors"
  fusermount3 -u "$tmp/mnt"
  ckpt export -q "$run" "$tmp/out"
  cmp "$tmp/out/model.safetensors" "$expected/model.safetensors"
  rm -r "$tmp/out"
  mpirun --oversubscribe -n 2 ckpt load "$run" --layout tp=2 --readers once --verify
  ckpt load "$run" --layout tp=1 --verify
  ! XDG_CACHE_HOME=$tmp/cache AWS_ENDPOINT_URL=http://127.0.0.1:9 ckpt info -o anonymous s3://bucket/run 2>"$tmp/said" # the helper that makes HTTP is found, and starts
  grep -q "listing 's3://bucket/run/' .*connect" "$tmp/said" || { cat "$tmp/said" >&2; exit 1; }
}

say 'install what making packages needs'
contrib/install-deps.sh
apt-get install -y -qq --no-install-recommends build-essential debhelper dh-python lintian python3-venv libopenmpi-dev openmpi-bin git ca-certificates >/dev/null

before=$(leftovers | sort)
say 'contrib/package.sh deb'
contrib/package.sh deb
say 'apt-get install ./dist/*.deb'
apt-get install -y -qq $(ls "$PWD"/dist/*.deb | grep -v dbgsym) >/dev/null
use
say 'mount -t fuse.ckptfs, and fstab'
mkdir -p "$tmp/mnt2"
mount -t fuse.ckptfs "$run" "$tmp/mnt2" -o allow_other
cmp "$tmp/mnt2/latest/model.safetensors" "$expected/model.safetensors"
umount "$tmp/mnt2"
echo "$run $tmp/mnt2 fuse.ckptfs nofail 0 0" >>/etc/fstab
mount "$tmp/mnt2"
test -e "$tmp/mnt2/latest/config.json"
umount "$tmp/mnt2"
sed -i "\\,^$run ,d" /etc/fstab
(cd / && python3 -c "import ckptfs; print(ckptfs.__version__, len(ckptfs.open('$run').keys()), 'tensors')")
man -w ckptfs >/dev/null 2>&1 || test -e /usr/share/man/man1/ckptfs.1.gz || grep -qs path-exclude /etc/dpkg/dpkg.cfg.d/*
printf '#include <ckptfs/ckptfs.h>\n#include <stdio.h>\nint main(void) { puts(ckpt_version()); }\n' >"$tmp/use.c"
cc "$tmp/use.c" -o "$tmp/use" $(pkg-config --cflags --libs ckptfs) && "$tmp/use"
say 'apt-get purge'
apt-get purge -y -qq ckptfs ckptfs-http libckptfs0 libckptfs-dev libckptfs-load-mpi0 python3-ckptfs >/dev/null
after=$(leftovers | sort)
[[ $before == "$after" ]] || { diff <(echo "$before") <(echo "$after"); echo 'the Debian packages leave something behind' >&2; exit 1; }

say 'contrib/package.sh wheel'
contrib/package.sh wheel
for plugin in mpi nccl; do
  python3 -m zipfile -l dist/ckptfs-*.whl | grep "libckptfs_load_$plugin.so" >/dev/null || { echo "the wheel has no libckptfs_load_$plugin.so" >&2; exit 1; }
done
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" -q install dist/ckptfs-*.whl
(
  PATH=$tmp/venv/bin:$PATH
  use
  cd / && python -c "import ckptfs; print(ckptfs.__version__, len(ckptfs.open('$run').keys()), 'tensors')"
)
for file in man/man1/ckpt.1 bash-completion/completions/ckptfs; do
  test -e "$tmp/venv/share/$file" || { echo "the wheel has no $file" >&2; exit 1; }
done
"$tmp/venv/bin/pip" -q uninstall -y ckptfs
[[ -z $(find "$tmp/venv" -name '*ckpt*') ]] || { echo 'the wheel leaves something behind' >&2; exit 1; }
say 'packages: all good'
