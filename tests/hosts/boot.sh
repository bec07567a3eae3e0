#!/usr/bin/env bash
# The first process of a test host: gives it folders of its own and becomes its ssh server.
# boot.sh NAME STATE_DIR REPO: runs in new mount, UTS, IPC and PID namespaces.
set -euo pipefail
name=$1 state=$2 repo=$3
home=$(getent passwd 0 | cut -d: -f6)

mount --make-rprivate /
hostname "$name"
# What the host needs of the machine's own folders is bound first, and again where a new folder would hide it.
mount -t tmpfs tmpfs /mnt
mkdir /mnt/repo /mnt/state /mnt/disk
mount --bind "$repo" /mnt/repo
mount --bind "$state" /mnt/state
# The disk outlives a power cut.
disk=$state/disks/$name
mkdir -p "$disk/up" "$disk/work"
mount --bind "$disk" /mnt/disk
mount -t overlay overlay -o "lowerdir=$home,upperdir=/mnt/disk/up,workdir=/mnt/disk/work" "$home"
mount -t tmpfs tmpfs /tmp
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount -t tmpfs tmpfs /run
for folder in repo state; do
  path=$repo
  [ "$folder" = state ] && path=$state
  mkdir -p "$path"
  mountpoint -q "$path" || mount --bind "/mnt/$folder" "$path"
done
mkdir -p /run/sshd "$home/.ssh"
chmod 700 "$home/.ssh"
cp "$state/key.pub" "$home/.ssh/authorized_keys"
if [ ! -e /mnt/disk/was-on ]; then
  rm -rf "$home/.ray" "$home/kvrelay" # the machine's own
  # Its shells start a few hundred times; what the machine's own do at each start is not this host's.
  rm -f "$home"/.bash_profile "$home"/.bash_login "$home"/.profile
  echo '# A new host.' >"$home/.bashrc"
fi
touch /mnt/disk/was-on
ip link set lo up
# As its init, sshd reaps what daemons leave behind.
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME="$home" \
  /usr/sbin/sshd -D -e -f /dev/null -o "HostKey=$state/host_key" -o "PidFile=none" -o UsePAM=no -o StrictModes=no \
  -o PasswordAuthentication=no -o MaxSessions=100 -o MaxStartups=100 -o Subsystem="sftp internal-sftp"
