#!/bin/sh
# Once, before `docker compose up`: a server, four devices with five people of MovieLens-100K each, and their keys.
# Between machines a person carries the two files: ca.pem to the devices, device.pub to the server's operator.
set -eu
cd "$(dirname "$0")"

once() { docker compose run --rm -T "$@"; }

once server server init /state/server --method pfedrec --items ml-100k --rounds 12 --least 20 \
    --listen 0.0.0.0:9092 --host server
for n in 0 1 2 3; do
    once --entrypoint cat server /state/server/keys/ca.pem | once --entrypoint tee device$n /state/ca.pem > /dev/null
    once device$n data export ml-100k /state/people.csv --users $((5 * n))-$((5 * n + 4))
    once device$n client init /state/device --server server:9092 --ca /state/ca.pem --name device$n
    once device$n client import /state/device /state/people.csv
    once --entrypoint cat device$n /state/device/device.pub | once --entrypoint tee server /state/device$n.pub > /dev/null
    once server keys add /state/server /state/device$n.pub --name device$n --people 5
done
