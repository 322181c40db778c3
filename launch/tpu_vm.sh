#!/usr/bin/env bash
# One TPU VM from birth to deletion; single- and multi-host are the same.
#
#   launch/tpu_vm.sh [--dry_run] create|setup|run|logs|stop|delete [-- ARGS]
#
# Environment: TPU_NAME ZONE (always), ACCEL RUNTIME (create), and optionally
# PROJECT, SPOT=1 (create), WORKER (logs; default 0).
set -euo pipefail

die() { echo "tpu_vm.sh: $1" >&2; exit 2; }
need() {
  local name
  for name in "$@"; do
    [[ -n ${!name:-} ]] || die "set $name in the environment to '$verb'."
  done
}
# Prints instead of running under --dry_run; the printed line can be pasted.
run() {
  if [[ -n $dry_run ]]; then printf '%q ' "$@"; echo; else "$@"; fi
}
tpu() {
  local action=$1
  shift
  run gcloud compute tpus tpu-vm "$action" "$@" "--zone=$ZONE" \
    ${PROJECT:+"--project=$PROJECT"}
}
on_workers() { tpu ssh "$TPU_NAME" "--worker=$1" "--command=$2"; }

dry_run='' verb=''
while (($#)) && [[ $1 != -- ]]; do
  case $1 in
    --dry_run) dry_run=1 ;;
    create | setup | run | logs | stop | delete)
      [[ -z $verb ]] || die "one verb at a time, not '$verb' and '$1'."
      verb=$1 ;;
    *) die "unknown argument '$1'; arguments of the trainer go after --." ;;
  esac
  shift
done
(($# == 0)) || shift
[[ -n $verb ]] || die 'say create, setup, run, logs, stop or delete.'
[[ $verb == run || $# == 0 ]] || die "'$verb' takes no arguments after --."
need TPU_NAME ZONE
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

case $verb in
  create)
    need ACCEL RUNTIME
    [[ ${SPOT:-0} == 0 ]] && spot='' || spot=--spot
    tpu create "$TPU_NAME" "--accelerator-type=$ACCEL" "--version=$RUNTIME" \
      ${spot:+"$spot"} ;;
  setup)  # copies the committed tree; runs/ on the VM survives a second setup
    [[ -z $(git -C "$root" status --porcelain) ]] ||
      echo 'tpu_vm.sh: uncommitted changes are not copied.' >&2
    run mkdir -p "$root/dist"
    run git -C "$root" archive -o "$root/dist/envace_jax.tar.gz" HEAD
    tpu scp "$root/dist/envace_jax.tar.gz" "$TPU_NAME:" --worker=all
    # The image's Python is older than ours, so uv brings its own.
    on_workers all 'set -e; mkdir -p envace_jax; cd envace_jax
tar -xzf ../envace_jax.tar.gz --recursive-unlink
python3 -m pip install --quiet --user uv
python3 -m uv venv --quiet --allow-existing --python 3.12 .venv
python3 -m uv pip install --quiet --python .venv/bin/python -e ".[tpu]"' ;;
  run)
    (($#)) || die "give 'run' the trainer's arguments after --."
    # Quoted once for the shell in tmux, and as a whole once more for ssh's.
    printf -v train '%q ' .venv/bin/envace train "$@"
    printf -v job '%q' "$train >> train.log 2>&1 & echo \$! > train.pid
wait \$!; echo \"exit status \$?\" >> train.log; rm train.pid"
    on_workers all \
      "cd envace_jax && tmux new-session -d -s envace bash -c $job" ;;
  logs) on_workers "${WORKER:-0}" 'tail -n 100 -F envace_jax/train.log' ;;
  stop)  # SIGTERM makes the trainer save; wait until every worker has
    # shellcheck disable=SC2016  # the VM expands it
    on_workers all 'pid=$(cat envace_jax/train.pid) && kill -TERM $pid &&
timeout 600 tail --pid=$pid -f /dev/null' ;;
  delete) tpu delete "$TPU_NAME" --quiet ;;
esac
