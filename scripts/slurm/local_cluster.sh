#!/bin/sh
# A real Slurm of two nodes on this machine, without systemd, for as long as a command runs:
#
#   sh scripts/slurm/local_cluster.sh FOLDER COMMAND [ARGUMENT ...]
#
# Needs munge, slurmctld and slurmd (Debian: apt-get install slurm-wlm munge). State and logs are in FOLDER. Partitions
# gpu (two made-up GPUs of type "standin" on each node) and standard; a requeued job starts again after seconds, not
# after two minutes. SLURM_LOCAL_PORT moves its three ports (default: from 16817); SLURM_LOCAL_LAG is by how many
# seconds the second node's tasks start later (default: 10).
set -eu

[ $# -ge 2 ] || {
    sed -n '2,9p' "$0" | sed 's/^# \{0,1\}//'
    exit 2
}
mkdir -p "$1"
folder=$(CDPATH='' cd -- "$1" && pwd)
shift
PATH=$PATH:/usr/sbin:/sbin
for program in munged slurmctld slurmd; do
    command -v "$program" >/dev/null 2>&1 || {
        printf 'error: %s is not installed (Debian: apt-get install slurm-wlm munge)\n' "$program" >&2
        exit 1
    }
done
host=$(hostname)
user=$(id -un)
port=${SLURM_LOCAL_PORT:-16817}
cpus=$(getconf _NPROCESSORS_ONLN)
chmod 755 "$folder"
mkdir -p "$folder/munge" "$folder/state" "$folder/spool" "$folder/log"
chmod 700 "$folder/munge"
touch "$folder/gpu0" "$folder/gpu1"

daemons="slurmd-n2 slurmd-n1 slurmctld munged"
for name in $daemons; do
    rm -f "$folder/$name.pid"
done
# shellcheck disable=SC2317,SC2329 # the trap calls it
end() {
    squeue -h -o %A 2>/dev/null | xargs -r scancel --signal=KILL --full 2>/dev/null || true
    for name in $daemons; do
        if pid=$(cat "$folder/$name.pid" 2>/dev/null); then
            kill "$pid" 2>/dev/null || true
        fi
    done
}
trap end EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

[ -f "$folder/munge/key" ] || (umask 077 && head -c 1024 /dev/urandom >"$folder/munge/key")
munged --force --key-file="$folder/munge/key" --socket="$folder/munge.sock" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munge/log" --seed-file="$folder/munge/seed"

cat >"$folder/slurm.conf" <<CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits for as long as its old credential is good; less than 5 would mean the usual 120.
AuthInfo=socket=$folder/munge.sock,cred_expire=5
SlurmctldPort=$port
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$folder/log/jobs.txt
SchedulerParameters=sched_interval=2,batch_sched_delay=0
GresTypes=gpu
KillWait=10
TaskProlog=$folder/task_prolog
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=$cpus RealMemory=4096 Gres=gpu:standin:2
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=$cpus RealMemory=4096 Gres=gpu:standin:2
PartitionName=gpu Nodes=n1,n2 MaxTime=03:00:00
PartitionName=standard Nodes=n1,n2 MaxTime=1-00:00:00
CONF
# accelerate wants its port free on the first node, and here the second node's processes would already hold it.
cat >"$folder/task_prolog" <<PROLOG
#!/bin/sh
[ "\${SLURM_NODEID:-0}" = 0 ] || sleep ${SLURM_LOCAL_LAG:-10}
PROLOG
chmod 755 "$folder/task_prolog"
printf 'AutoDetect=off\nName=gpu Type=standin File=%s/gpu[0-1]\n' "$folder" >"$folder/gres.conf"

SLURM_CONF=$folder/slurm.conf
export SLURM_CONF
slurmctld -c
slurmd -N n1
slurmd -N n2
waited=0
until [ "$(sinfo -h -p gpu -t idle -o %D 2>/dev/null)" = 2 ]; do
    waited=$((waited + 1))
    [ "$waited" -le 60 ] || {
        printf 'error: the nodes did not come up in 30 s; see %s\n' "$folder/log" >&2
        exit 1
    }
    sleep 0.5
done
status=0
"$@" || status=$?
exit "$status"
