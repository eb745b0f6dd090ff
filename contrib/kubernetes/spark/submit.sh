#!/bin/sh
# The same as application.yaml without the operator:
#   contrib/kubernetes/spark/submit.sh k8s://https://CLUSTER:6443
# Put your registry's image, your server's address and your claim below. Nothing starts the query again
# after a failure; run it again then.
exec "${SPARK_SUBMIT:-spark-submit}" \
    --master "$1" \
    --deploy-mode cluster \
    --name datastreamer-blocks \
    --jars local:///opt/datastreamer/datastreamer-spark.jar \
    --driver-memory 2g \
    --executor-memory 2g \
    --executor-cores 2 \
    --num-executors 2 \
    --conf spark.kubernetes.namespace=spark \
    --conf spark.kubernetes.container.image=registry.example/datastreamer-spark:0.1.0 \
    --conf spark.kubernetes.authenticate.driver.serviceAccountName=spark \
    --conf spark.kubernetes.driver.volumes.persistentVolumeClaim.tables.options.claimName=tables \
    --conf spark.kubernetes.driver.volumes.persistentVolumeClaim.tables.mount.path=/tables \
    --conf spark.kubernetes.executor.volumes.persistentVolumeClaim.tables.options.claimName=tables \
    --conf spark.kubernetes.executor.volumes.persistentVolumeClaim.tables.mount.path=/tables \
    --conf spark.kubernetes.submission.waitAppCompletion=false \
    --conf spark.pyspark.python=python3 \
    local:///opt/datastreamer/spark_blocks.py relay:6900 /tables
