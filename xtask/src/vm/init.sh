#!/bin/busybox sh
# First process of the test machine: mounts what a node has, loads the modules, runs the test and powers off.
/bin/busybox --install -s /bin
export PATH=/bin HOME=/
mount -t devtmpfs devtmpfs /dev
exec </dev/console >/dev/console 2>&1
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t bpf bpf /sys/fs/bpf
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /tmp
ip link set lo up
while read -r module; do
    insmod "$module" || echo "KNI-VM: FAIL cannot load $module"
done </modules/order
echo "kernel $(uname -r)"
# A message of the kernel in the middle of a line would hide the line's meaning.
dmesg -n 1
KNI_EBPF_OBJECT=/kni-ebpf.o RUST_BACKTRACE=1 /kni-vmtest
code=$?
[ "$code" -eq 0 ] || dmesg | tail -n 40
echo "the test program ended with exit code $code"
poweroff -f
