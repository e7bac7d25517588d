#!/bin/sh
# The whole example on one machine: four hospitals and the server talk over loopback. Run it in an empty folder:
#   sh PATH/examples/hospitals/on_one_machine.sh
# with ALLHANDS_DATA naming the folder of heart_disease_sites.npz. PORT is the server's; default 8000.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
port=${PORT:-8000}
sites=
trap 'kill $sites 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT TERM
cp "$here/hospital.py" "$here/run.yml" .

python "$here/split.py" data
allhands federated certificates --out keys --host 127.0.0.1 \
    --site cleveland --site hungarian --site switzerland --site va

for name in cleveland hungarian switzerland va; do
    allhands federated site -C run.yml --server "127.0.0.1:$port" --data "data/$name" --name "$name" \
        --key "keys/sites/$name.key" --authority keys/authority.crt > "$name.log" 2>&1 &
    sites="$sites $!"
done
allhands federated server -C run.yml --port "$port" --sites keys/sites.txt \
    --certificate keys/server.crt --key keys/server.key --authority keys/authority.crt

python "$here/compare.py" data logs/hospitals
