#!/usr/bin/env bash
# A Docker engine of its own for tests/server/deploy/test_docker.py, as root on Debian 12 or newer; no systemd, no container
# registry is needed.
#
#   docker-engine.sh start DIR   Debian's packages, an engine that listens on DIR/docker.sock, python:3.11-slim
#   docker-engine.sh stop DIR    ends it and takes away what `start` made, also after a crash; the packages stay
#
# Where it cannot be done `start` says why on its last line.
set -euo pipefail

DIR=${2:?"$0 start|stop DIR"}
BASE=python:3.11-slim
BASE_SUITE=bookworm   # its python3 is 3.11
ENGINE_SUITE=trixie   # engine 26, buildx 0.13, compose 2.26; bookworm's know no named build contexts
ENGINE_PACKAGES=(docker.io docker-cli docker-buildx docker-compose)
CGROUP=silofl-docker-test
export PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin  # `su` leaves these out
export DOCKER_HOST=unix://$DIR/docker.sock DOCKER_CONFIG=$DIR/config TMPDIR=$DIR/tmp DEBIAN_FRONTEND=noninteractive

say() { printf '[docker-engine %3ss] %s\n' "$SECONDS" "$*"; }
die() { say "$*"; exit 1; }
answers() { timeout 10 docker version >/dev/null 2>&1; }
apt() { apt-get -qq -o DPkg::Lock::Timeout=180 -o Acquire::Retries=3 "$@"; }
mirror() { apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Label: $1" | awk '!n++'; }
links() { ls /sys/class/net | sort; }

# --- start --------------------------------------------------------------------------------------------------

install_packages() {
  local missing=()
  command -v dockerd >/dev/null && docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1 ||
    missing+=("${ENGINE_PACKAGES[@]}")
  command -v iptables-save >/dev/null || missing+=(iptables)
  command -v ip >/dev/null || missing+=(iproute2)
  command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
  [ ${#missing[@]} -gt 0 ] || return 0
  say "installing ${missing[*]}"
  apt update
  if [ "$VERSION_CODENAME" = bookworm ]; then  # these four from the next release, for as long as this takes
    local sources=/etc/apt/sources.list.d/$CGROUP.sources pins=/etc/apt/preferences.d/$CGROUP
    trap "rm -f $sources $pins" EXIT
    printf '%s\n' "Types: deb" "URIs: $(mirror Debian)" "Suites: $ENGINE_SUITE" "Components: main" \
      "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg" > "$sources"
    printf '%s\n' "Package: *" "Pin: release n=$ENGINE_SUITE" "Pin-Priority: -1" "" \
      "Package: ${ENGINE_PACKAGES[*]}" "Pin: release n=$ENGINE_SUITE" "Pin-Priority: 990" > "$pins"
    apt update
  fi
  apt install -y --no-install-recommends "${missing[@]}" > "$DIR/apt.log" 2>&1 ||
    die "apt-get install ${missing[*]}: $(tail -1 "$DIR/apt.log")"
  if [ "$VERSION_CODENAME" = bookworm ]; then rm -f "$sources" "$pins"; apt update; fi
}

start_engine() {
  if ! mountpoint -q /sys/fs/cgroup; then  # a machine without systemd
    touch "$DIR/cgroup-mounted"
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
  fi
  # What `stop` restores. The engine never takes its bridge and its rules away by itself.
  links > "$DIR/links"
  { iptables-save -t filter; iptables-save -t nat; } > "$DIR/iptables"
  cat /proc/sys/net/ipv4/ip_forward > "$DIR/ip_forward"
  local folder
  for folder in /run/docker /run/containerd; do [ -e $folder ] || echo $folder; done > "$DIR/folders"
  local uplink mtu storage
  uplink=$(ip -o route show default | awk '!n++ {print $5}')
  mtu=$(cat "/sys/class/net/${uplink:-lo}/mtu")
  for storage in overlay2 vfs; do
    setsid dockerd --host "$DOCKER_HOST" --data-root "$DIR/data" --exec-root "$DIR/exec" --pidfile "$DIR/pid" \
      --mtu "$((mtu < 1500 ? mtu : 1500))" --storage-driver $storage \
      --cgroup-parent "/$CGROUP" --exec-opt native.cgroupdriver=cgroupfs > "$DIR/log" 2>&1 < /dev/null &
    for _ in $(seq 120); do
      answers && { say "the engine answers ($storage)"; return 0; }
      kill -0 $! 2>/dev/null || break
      sleep 0.5
    done
    kill $! 2>/dev/null || true
    wait $! || true
  done
  die "dockerd does not start: $(tail -1 "$DIR/log" | cut -c1-300)"
}

# The registry's image where there is a registry; otherwise Debian's Python, with this machine's extra CAs, behind
# which the package index may be.
base_image() {
  timeout 120 docker pull --quiet "$BASE" >/dev/null 2>&1 && { say "pulled $BASE"; return 0; }
  base_tar
  docker import --change 'ENV LANG=C.UTF-8' --change 'CMD ["python3"]' "$DIR/base.tar" "$BASE" >/dev/null
  rm "$DIR/base.tar"
  say "made $BASE"
}

base_tar() {  # also for Podman (tests/helpers/debian13.py)
  say "no registry: making $BASE of Debian $BASE_SUITE"
  [ -n "$(mirror Debian-Security)" ] || apt update
  local debian security
  debian=$(mirror Debian)
  security=$(mirror Debian-Security)
  cat > "$DIR/customize" <<'EOF'
set -e
for file in /usr/local/share/ca-certificates/*.crt; do
  [ ! -e "$file" ] || cp "$file" "$1/usr/local/share/ca-certificates/"
done
chroot "$1" update-ca-certificates
rm -rf "$1"/usr/lib/python3*/EXTERNALLY-MANAGED "$1"/usr/share/doc/* "$1"/usr/share/man/*
ln -s python3 "$1/usr/bin/python"
printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' > "$1/etc/pip.conf"
EOF
  local suites=("deb $debian $BASE_SUITE main" "deb $debian $BASE_SUITE-updates main")
  [ -z "$security" ] || suites+=("deb $security $BASE_SUITE-security main")
  mmdebstrap --mode=root --variant=minbase --include=python3,python3-venv,ca-certificates \
    --customize-hook="sh '$DIR/customize' \"\$1\"" $BASE_SUITE "$DIR/base.tar" "${suites[@]}" \
    > "$DIR/mmdebstrap.log" 2>&1 || die "mmdebstrap: $(grep '^E:' "$DIR/mmdebstrap.log" | head -1)"
}

start() {
  . /etc/os-release
  [ "$(id -u)" = 0 ] && [ "$ID" = debian ] || die "an engine can be started only as root on Debian"
  unshare --mount --net --pid --fork true 2>/dev/null || die "this machine lets nobody make namespaces"
  stop >/dev/null
  mkdir -p "$DIR/tmp" "$DIR/config"
  chmod 0755 "$DIR" "$DIR/tmp"
  install_packages
  start_engine
  base_image
}

# --- stop ---------------------------------------------------------------------------------------------------

gone() {  # wait until no such process is left
  for _ in $(seq 120); do kill -0 "$@" 2>/dev/null || return 0; sleep 0.25; done
  return 1
}

stop() {
  [ -d "$DIR" ] || return 0
  local pid paths file
  if answers; then docker ps --all --quiet | xargs --no-run-if-empty docker rm --force --volumes >/dev/null || true; fi
  pid=$(cat "$DIR/pid" 2>/dev/null || true)
  if [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ]; then
    kill "$pid"
    gone "$pid" || kill -9 "$pid"
  fi
  # What an engine that was killed leaves: containers, their shims, mounts.
  for file in /proc/[0-9]*/cmdline; do
    if tr '\0' ' ' < "$file" 2>/dev/null | grep -qF "$DIR/exec/"; then
      pid=${file#/proc/}
      kill -9 "${pid%/cmdline}" 2>/dev/null || true
    fi
  done
  paths=$(find /sys/fs/cgroup -depth -type d -path "*/$CGROUP*" 2>/dev/null || true)
  for file in $paths; do
    while read -r pid; do kill -9 "$pid" 2>/dev/null || true; done < "$file/cgroup.procs"
  done
  sleep 0.2
  for file in $paths; do rmdir "$file" 2>/dev/null || true; done
  awk -v dir="$DIR/" 'index($2, dir) == 1 {print $2}' /proc/mounts | sort -r | xargs --no-run-if-empty umount --lazy
  # `start` may have failed before it wrote all of these.
  if [ -f "$DIR/links" ]; then
    links | comm -13 "$DIR/links" - | while read -r file; do ip link delete "$file" 2>/dev/null || true; done
  fi
  if [ -s "$DIR/iptables" ]; then iptables-restore < "$DIR/iptables"; fi
  if [ -s "$DIR/ip_forward" ]; then cat "$DIR/ip_forward" > /proc/sys/net/ipv4/ip_forward; fi
  if [ -s "$DIR/folders" ]; then xargs --no-run-if-empty rm -rf < "$DIR/folders"; fi
  [ ! -f "$DIR/cgroup-mounted" ] || umount /sys/fs/cgroup || true
  rm -rf "$DIR"
}

"$1"
