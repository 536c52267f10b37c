#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run a command of this tree, as it was last committed, on a bare Debian: in a chroot that debootstrap makes and that holds nothing
# else. As root, by hand.
#
#   tests/chroot.sh SUITE [COMMAND ...]      SUITE: bookworm, trixie ...; the default commands are those of README's "Try it"
#
# CKPTFS_CHROOTS (default /var/tmp/ckptfs-chroots) keeps each suite's bare system, which is copied for every run. The chroot sees
# what PIP_CERT and PIP_FIND_LINKS name, if they are set.
set -euo pipefail
cd "$(dirname "$0")/.."
(($#)) || { sed -n '3,9p' "$0"; exit 2; }
suite=$1
shift
(($#)) || set -- 'contrib/quickstart.sh && tests/run.sh'

chroots=${CKPTFS_CHROOTS:-/var/tmp/ckptfs-chroots}
bare=$chroots/$suite
root=$chroots/$suite.run.$$
if [[ ! -e $bare/etc/debian_version ]]; then
  mkdir -p "$chroots"
  debootstrap --variant=minbase "$suite" "$bare.new" >&2
  rm -rf "$bare"
  mv "$bare.new" "$bare"
fi

cleanup() {
  local d
  for d in "${PIP_FIND_LINKS:-}" /dev /sys /proc; do
    [[ -z $d ]] || ! mountpoint -q "$root$d" || umount -l "$root$d"
  done
  ! mountpoint -q "$root" || umount -l "$root"
  rm -rf --one-file-system "$root"
}
trap cleanup EXIT
cp -a "$bare" "$root"
mount --bind --make-private "$root" "$root" # a mount point, as every root is: mount namespaces need that
mount -t proc proc "$root/proc"
mount --rbind --make-rslave /sys "$root/sys"
mount --rbind --make-rslave /dev "$root/dev"
cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
ln -sfn ../proc/self/mounts "$root/etc/mtab" # made when a system boots; fusermount3 reads it
settings=()
if [[ -f ${PIP_CERT:-} ]]; then # under a name of its own: installing ca-certificates makes the system's file anew
  cp -L "$PIP_CERT" "$root/root/certificates.crt"
  settings+=(PIP_CERT=/root/certificates.crt)
fi
if [[ -d ${PIP_FIND_LINKS:-} ]]; then
  mkdir -p "$root$PIP_FIND_LINKS"
  mount --bind -o ro "$PIP_FIND_LINKS" "$root$PIP_FIND_LINKS"
  settings+=("PIP_FIND_LINKS=$PIP_FIND_LINKS")
fi
git clone -q --no-hardlinks . "$root/root/ckptfs"
for command; do
  chroot "$root" /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 "${settings[@]}" \
    bash -c "cd /root/ckptfs && $command"
done
