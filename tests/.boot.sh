extras=train,demo,dev
. cluster/bootstrap.sh
