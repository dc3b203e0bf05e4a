#!/bin/sh
# Least rights on Google Cloud: sh cluster/bucket/grant.gcs.sh PROJECT BUCKET PREFIX
# Creates the roles of roles.gcs/ and grants them to the service accounts trainer, reader, and sweeper. Repeatable.
set -eu
project=$1 bucket=$2 prefix=$3
objects="projects/_/buckets/$bucket/objects"

for role in writer reader deleter lister visitor; do
    verb=create
    if gcloud iam roles describe "raycheck_$role" --project "$project" >/dev/null 2>&1; then verb=update; fi
    gcloud iam roles "$verb" "raycheck_$role" --project "$project" --quiet --file "$(dirname "$0")/roles.gcs/$role.yaml"
done

grant() { # account, role, objects, and their name; without objects: the bucket itself, which listings need
    condition=None
    if [ $# -ge 3 ]; then condition="title=$1-$2${4:+-$4},expression=$3"; fi
    gcloud storage buckets add-iam-policy-binding "gs://$bucket" --condition "$condition" \
        --member "serviceAccount:$1@$project.iam.gserviceaccount.com" --role "projects/$project/roles/raycheck_$2"
}

# No "/" at the end: Ray's file system also creates an empty object named like the prefix.
grant trainer writer "resource.name.startsWith('$objects/$prefix')"
grant trainer lister
grant trainer visitor
grant reader reader "resource.name.startsWith('$objects/$prefix/')"
grant reader lister
for file in latest raycheck.json; do # swaps of latest, and records of exports
    grant sweeper writer "resource.name.startsWith('$objects/$prefix/') && resource.name.endsWith('/$file')" "$file"
done
for folder in checkpoints exports holds; do
    grant sweeper deleter "resource.name.extract('$objects/$prefix/{run}/$folder/') != ''" "$folder"
done
grant sweeper reader "resource.name.extract('$objects/$prefix/{run}/holds/') != ''" holds
grant sweeper writer "resource.name.extract('$objects/$prefix/{run}/pages/') != ''" pages
grant sweeper lister
