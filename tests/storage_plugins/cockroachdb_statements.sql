CREATE INDEX IF NOT EXISTS message_dead ON timeline.message (topic, bucket, id) WHERE died_ms != 0;

CREATE INDEX IF NOT EXISTS message_died ON timeline.message (topic, died_ms) USING HASH WITH (bucket_count = 16) WHERE died_ms != 0;

CREATE INDEX IF NOT EXISTS message_expires ON timeline.message (topic, expires_ms) USING HASH WITH (bucket_count = 16) WHERE expires_ms != 0 AND died_ms = 0;

CREATE INDEX IF NOT EXISTS message_free ON timeline.message (topic, due_ms, id) USING HASH WITH (bucket_count = 16) WHERE died_ms = 0 AND holder = ''::bytea;

CREATE INDEX IF NOT EXISTS message_held ON timeline.message (topic, due_ms, id) USING HASH WITH (bucket_count = 16) WHERE died_ms = 0 AND holder != ''::bytea;

CREATE INDEX IF NOT EXISTS message_tag ON timeline.message (topic, tag, bucket, id) WHERE tag != ''::bytea;

CREATE INDEX IF NOT EXISTS remembered_settled ON timeline.remembered (topic, settled_ms) USING HASH WITH (bucket_count = 16);

CREATE SCHEMA IF NOT EXISTS timeline;

CREATE TABLE IF NOT EXISTS timeline.dropped (
    key BIGINT NOT NULL,
    PRIMARY KEY (key)
);

CREATE TABLE IF NOT EXISTS timeline.message (
    "row" BIGINT NOT NULL,
    topic BIGINT NOT NULL,
    bucket BIGINT NOT NULL,
    id BYTEA NOT NULL,
    birth BIGINT NOT NULL,
    version BIGINT DEFAULT 1 NOT NULL,
    due_ms BIGINT NOT NULL,
    scheduled_ms BIGINT NOT NULL,
    put_ms BIGINT NOT NULL,
    asked_ms BIGINT NOT NULL,
    deliveries BIGINT DEFAULT 0 NOT NULL,
    last_op BIGINT DEFAULT 0 NOT NULL,
    expires_ms BIGINT NOT NULL,
    payload_sum BIGINT NOT NULL,
    payload_bytes BIGINT NOT NULL,
    died_ms BIGINT DEFAULT 0 NOT NULL,
    headers_bytes BIGINT NOT NULL,
    grp BYTEA NOT NULL,
    holder BYTEA DEFAULT ''::bytea NOT NULL,
    tag BYTEA NOT NULL,
    dead BYTEA DEFAULT ''::bytea NOT NULL,
    PRIMARY KEY ("row")
);

CREATE TABLE IF NOT EXISTS timeline.meta (
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (name)
);

CREATE TABLE IF NOT EXISTS timeline.payload (
    "row" BIGINT NOT NULL,
    payload BYTEA NOT NULL,
    headers BYTEA NOT NULL,
    PRIMARY KEY ("row")
);

CREATE TABLE IF NOT EXISTS timeline.remembered (
    topic BIGINT NOT NULL,
    id BYTEA NOT NULL,
    birth BIGINT NOT NULL,
    version BIGINT NOT NULL,
    payload_sum BIGINT NOT NULL,
    last_op BIGINT NOT NULL,
    settled_ms BIGINT NOT NULL,
    PRIMARY KEY (topic, id)
);

CREATE TABLE IF NOT EXISTS timeline.topic (
    uid BIGINT NOT NULL,
    name TEXT NOT NULL,
    settings TEXT NOT NULL,
    revision BIGINT NOT NULL,
    created_ms BIGINT NOT NULL,
    key BIGINT AS (uid) STORED,
    PRIMARY KEY (uid),
    UNIQUE (name)
);

CREATE UNIQUE INDEX IF NOT EXISTS message_id ON timeline.message (topic, bucket, id);

DELETE FROM timeline.dropped WHERE key = $1;

DELETE FROM timeline.remembered WHERE topic = $1 AND settled_ms <= $2 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) ORDER BY settled_ms LIMIT $3;

DELETE FROM timeline.remembered WHERE topic = $1 ORDER BY id LIMIT $2;

DELETE FROM timeline.topic WHERE uid = $1;

INSERT INTO timeline.dropped (key) VALUES ($1);

INSERT INTO timeline.meta (name, value) VALUES ('schema_version', $1), ('cluster_uid', $2) ON CONFLICT DO NOTHING;

INSERT INTO timeline.meta (name, value) VALUES ('schema_version', $1), ('oldest_version', $2) ON CONFLICT (name) DO UPDATE SET value = excluded.value;

INSERT INTO timeline.topic (uid, name, settings, revision, created_ms) VALUES ($1, $2, $3, $4, $5) ON CONFLICT (name) DO NOTHING;

SELECT (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder != ''::bytea AND m.due_ms >= $2 AND m.due_ms < $3), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder != ''::bytea AND m.due_ms >= $4 AND m.due_ms < $5), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder != ''::bytea AND m.due_ms >= $6 AND m.due_ms < $7);

SELECT (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $2 AND m.due_ms < $3), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $4 AND m.due_ms < $5), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $6 AND m.due_ms < $7), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $8 AND m.due_ms < $9), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $10 AND m.due_ms < $11), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $12 AND m.due_ms < $13), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $14 AND m.due_ms < $15), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $16 AND m.due_ms < $17), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $18 AND m.due_ms < $19), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $20 AND m.due_ms < $21), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $22 AND m.due_ms < $23), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $24 AND m.due_ms < $25), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $26 AND m.due_ms < $27), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $28 AND m.due_ms < $29), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $30 AND m.due_ms < $31), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $32 AND m.due_ms < $33), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $34 AND m.due_ms < $35), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $36 AND m.due_ms < $37), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $38 AND m.due_ms < $39), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $40 AND m.due_ms < $41), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $42 AND m.due_ms < $43), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $44 AND m.due_ms < $45), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $46 AND m.due_ms < $47), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $48 AND m.due_ms < $49), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $50 AND m.due_ms < $51), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $52 AND m.due_ms < $53), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $54 AND m.due_ms < $55), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $56 AND m.due_ms < $57), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $58 AND m.due_ms < $59), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $60 AND m.due_ms < $61), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $62 AND m.due_ms < $63), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $64 AND m.due_ms < $65), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $66 AND m.due_ms < $67), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $68 AND m.due_ms < $69), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $70 AND m.due_ms < $71), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $72 AND m.due_ms < $73), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $74 AND m.due_ms < $75), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $76 AND m.due_ms < $77), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $78 AND m.due_ms < $79), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $80 AND m.due_ms < $81), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $82 AND m.due_ms < $83), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $84 AND m.due_ms < $85), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $86 AND m.due_ms < $87), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $88 AND m.due_ms < $89), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $90 AND m.due_ms < $91), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $92 AND m.due_ms < $93), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $94 AND m.due_ms < $95), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $96 AND m.due_ms < $97), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $98 AND m.due_ms < $99), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $100 AND m.due_ms < $101), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $102 AND m.due_ms < $103), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $104 AND m.due_ms < $105), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $106 AND m.due_ms < $107), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $108 AND m.due_ms < $109), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $110 AND m.due_ms < $111), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $112 AND m.due_ms < $113), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $114 AND m.due_ms < $115), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $116 AND m.due_ms < $117), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $118 AND m.due_ms < $119), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $120 AND m.due_ms < $121), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $122 AND m.due_ms < $123), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $124 AND m.due_ms < $125), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $126 AND m.due_ms < $127), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $128 AND m.due_ms < $129), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $130 AND m.due_ms < $131);

SELECT (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $2 AND m.due_ms < $3), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $4 AND m.due_ms < $5), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $6 AND m.due_ms < $7), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $8 AND m.due_ms < $9), (SELECT COUNT(*) FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms >= $10 AND m.due_ms < $11);

SELECT (SELECT m.due_ms FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms > $2 AND ($3::int8[] IS NULL OR m.bucket = ANY($3)) ORDER BY m.due_ms, m.id LIMIT 1), (SELECT m.due_ms FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder != ''::bytea AND m.due_ms > $4 AND ($5::int8[] IS NULL OR m.bucket = ANY($5)) ORDER BY m.due_ms, m.id LIMIT 1), 1;

SELECT extract(epoch FROM clock_timestamp())::float8 * 1000;

SELECT f.* FROM unnest($2::bytea[]) AS a(id), LATERAL (
  SELECT r.id, r.birth, r.version, r.payload_sum, r.last_op FROM timeline.remembered AS r
  WHERE r.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND r.id = a.id AND r.settled_ms + 0 > $3) AS f;

SELECT f.*, a.n FROM unnest($2::int8[], $3::bytea[]) WITH ORDINALITY AS a(bucket, id, n), LATERAL (
  SELECT m."row", m.bucket, m.headers_bytes, m.birth, m.version, m.due_ms, m.scheduled_ms, m.put_ms, m.asked_ms, m.deliveries, m.last_op, m.expires_ms, m.payload_sum, m.payload_bytes, m.died_ms, m.id, m.grp, m.holder, m.tag, m.dead FROM timeline.message AS m
  WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND m.bucket = a.bucket AND m.id = a.id
) AS f;

SELECT key FROM timeline.dropped ORDER BY key LIMIT 1;

SELECT key FROM timeline.topic WHERE name = $1 AND uid = $2 FOR UPDATE;

SELECT key FROM timeline.topic WHERE uid = $1;

SELECT m."row", m.bucket, m.headers_bytes, m.birth, m.version, m.due_ms, m.scheduled_ms, m.put_ms, m.asked_ms, m.deliveries, m.last_op, m.expires_ms, m.payload_sum, m.payload_bytes, m.died_ms, m.id, m.grp, m.holder, m.tag, m.dead FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND (m.bucket, m.id) > ($2, $3) AND ((m.died_ms = $4 AND m.due_ms <= $5) OR m.died_ms != $6 OR (m.died_ms = $7 AND m.holder != $8 AND m.due_ms > $9) OR (m.died_ms = $10 AND m.holder = $11 AND m.due_ms > $12)) ORDER BY m.bucket, m.id LIMIT $13;

SELECT m."row", m.bucket, m.headers_bytes, m.birth, m.version, m.due_ms, m.scheduled_ms, m.put_ms, m.asked_ms, m.deliveries, m.last_op, m.expires_ms, m.payload_sum, m.payload_bytes, m.died_ms, m.id, m.grp, m.holder, m.tag, m.dead FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND (m.bucket, m.id) > ($2, $3) AND ((m.died_ms = $4 AND m.due_ms <= $5)) ORDER BY m.bucket, m.id LIMIT $6;

SELECT m."row", m.bucket, m.headers_bytes, m.birth, m.version, m.due_ms, m.scheduled_ms, m.put_ms, m.asked_ms, m.deliveries, m.last_op, m.expires_ms, m.payload_sum, m.payload_bytes, m.died_ms, m.id, m.grp, m.holder, m.tag, m.dead FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND (m.bucket, m.id) > ($2, $3) AND ((m.died_ms = $4 AND m.holder != $5 AND m.due_ms > $6)) ORDER BY m.bucket, m.id LIMIT $7;

SELECT m."row", m.bucket, m.headers_bytes, m.birth, m.version, m.due_ms, m.scheduled_ms, m.put_ms, m.asked_ms, m.deliveries, m.last_op, m.expires_ms, m.payload_sum, m.payload_bytes, m.died_ms, m.id, m.grp, m.holder, m.tag, m.dead FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND (m.bucket, m.id) > ($2, $3) AND ((m.died_ms = $4 AND m.holder = $5 AND m.due_ms > $6)) ORDER BY m.bucket, m.id LIMIT $7;

SELECT m."row", m.bucket, m.headers_bytes, m.birth, m.version, m.due_ms, m.scheduled_ms, m.put_ms, m.asked_ms, m.deliveries, m.last_op, m.expires_ms, m.payload_sum, m.payload_bytes, m.died_ms, m.id, m.grp, m.holder, m.tag, m.dead FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND (m.bucket, m.id) > ($2, $3) AND (m.died_ms != $4 OR (m.died_ms = $5 AND m.holder = $6 AND m.due_ms > $7)) ORDER BY m.bucket, m.id LIMIT $8;

SELECT m."row", m.bucket, m.headers_bytes, m.birth, m.version, m.due_ms, m.scheduled_ms, m.put_ms, m.asked_ms, m.deliveries, m.last_op, m.expires_ms, m.payload_sum, m.payload_bytes, m.died_ms, m.id, m.grp, m.holder, m.tag, m.dead FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND (m.bucket, m.id) > ($2, $3) AND (m.died_ms = $4) AND m.due_ms >= $5 ORDER BY m.bucket, m.id LIMIT $6;

SELECT m."row", m.bucket, m.headers_bytes, m.birth, m.version, m.due_ms, m.scheduled_ms, m.put_ms, m.asked_ms, m.deliveries, m.last_op, m.expires_ms, m.payload_sum, m.payload_bytes, m.died_ms, m.id, m.grp, m.holder, m.tag, m.dead FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND (m.bucket, m.id) > ($2, $3) AND (m.died_ms = $4) ORDER BY m.bucket, m.id LIMIT $5;

SELECT m."row", m.bucket, m.headers_bytes, m.birth, m.version, m.due_ms, m.scheduled_ms, m.put_ms, m.asked_ms, m.deliveries, m.last_op, m.expires_ms, m.payload_sum, m.payload_bytes, m.died_ms, m.id, m.grp, m.holder, m.tag, m.dead FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms != 0 AND (m.bucket, m.id) > ($2, $3) AND (m.died_ms != $4) ORDER BY m.bucket, m.id LIMIT $5;

SELECT m."row", m.bucket, m.headers_bytes, m.birth, m.version, m.due_ms, m.scheduled_ms, m.put_ms, m.asked_ms, m.deliveries, m.last_op, m.expires_ms, m.payload_sum, m.payload_bytes, m.died_ms, m.id, m.grp, m.holder, m.tag, m.dead FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms != 0 AND m.died_ms <= $2 ORDER BY m.died_ms LIMIT $3;

SELECT m."row", m.bucket, m.headers_bytes, m.birth, m.version, m.due_ms, m.scheduled_ms, m.put_ms, m.asked_ms, m.deliveries, m.last_op, m.expires_ms, m.payload_sum, m.payload_bytes, m.died_ms, m.id, m.grp, m.holder, m.tag, m.dead FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder != ''::bytea AND (m.due_ms, m.id) > ($2, $3) AND m.holder = $4 ORDER BY m.due_ms, m.id LIMIT $5;

SELECT m."row", m.bucket, m.headers_bytes, m.birth, m.version, m.due_ms, m.scheduled_ms, m.put_ms, m.asked_ms, m.deliveries, m.last_op, m.expires_ms, m.payload_sum, m.payload_bytes, m.died_ms, m.id, m.grp, m.holder, m.tag, m.dead FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder != ''::bytea AND m.due_ms <= $2 AND (m.due_ms, m.id) > ($3, $4) AND ($5::int8[] IS NULL OR m.bucket = ANY($5)) ORDER BY m.due_ms, m.id LIMIT $6;

SELECT m."row", m.bucket, m.headers_bytes, m.birth, m.version, m.due_ms, m.scheduled_ms, m.put_ms, m.asked_ms, m.deliveries, m.last_op, m.expires_ms, m.payload_sum, m.payload_bytes, m.died_ms, m.id, m.grp, m.holder, m.tag, m.dead FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms = 0 AND holder = ''::bytea AND m.due_ms <= $2 AND (m.due_ms, m.id) > ($3, $4) AND ($5::int8[] IS NULL OR m.bucket = ANY($5)) ORDER BY m.due_ms, m.id LIMIT $6;

SELECT m."row", m.bucket, m.headers_bytes, m.birth, m.version, m.due_ms, m.scheduled_ms, m.put_ms, m.asked_ms, m.deliveries, m.last_op, m.expires_ms, m.payload_sum, m.payload_bytes, m.died_ms, m.id, m.grp, m.holder, m.tag, m.dead FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND expires_ms != 0 AND died_ms = 0 AND m.expires_ms <= $2 AND (m.holder = $3 OR m.due_ms <= $4) ORDER BY m.expires_ms LIMIT $5;

SELECT m."row", m.bucket, m.headers_bytes, m.birth, m.version, m.due_ms, m.scheduled_ms, m.put_ms, m.asked_ms, m.deliveries, m.last_op, m.expires_ms, m.payload_sum, m.payload_bytes, m.died_ms, m.id, m.grp, m.holder, m.tag, m.dead FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND tag != ''::bytea AND m.tag = $2 AND (m.bucket, m.id) > ($3, $4) AND (m.died_ms = $5) AND m.tag = $6 AND m.due_ms >= $7 AND m.due_ms < $8 ORDER BY m.bucket, m.id LIMIT $9;

SELECT m."row", m.bucket, m.headers_bytes, m.birth, m.version, m.due_ms, m.scheduled_ms, m.put_ms, m.asked_ms, m.deliveries, m.last_op, m.expires_ms, m.payload_sum, m.payload_bytes, m.died_ms, m.id, m.grp, m.holder, m.tag, m.dead FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND tag != ''::bytea AND m.tag = $2 AND (m.bucket, m.id) > ($3, $4) AND (m.died_ms = $5) AND m.tag = $6 ORDER BY m.bucket, m.id LIMIT $7;

SELECT m.bucket, m.id FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND (m.bucket, m.id) > ($2, $3) ORDER BY m.bucket, m.id LIMIT 1 OFFSET 19999;

SELECT m.bucket, m.id FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND died_ms != 0 AND (m.bucket, m.id) > ($2, $3) ORDER BY m.bucket, m.id LIMIT 1 OFFSET 19999;

SELECT m.bucket, m.id FROM timeline.message AS m WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND tag != ''::bytea AND m.tag = $2 AND (m.bucket, m.id) > ($3, $4) ORDER BY m.bucket, m.id LIMIT 1 OFFSET 19999;

SELECT name, value FROM timeline.meta;

SELECT p.payload, p.headers FROM unnest($1::int8[]) WITH ORDINALITY AS a("row", n) LEFT JOIN LATERAL (
  SELECT c.payload, c.headers FROM timeline.payload AS c WHERE c."row" = a."row") AS p ON true ORDER BY a.n;

SELECT t.uid, (SELECT m.due_ms FROM timeline.message AS m WHERE m.topic = t.key AND died_ms = 0 AND holder = ''::bytea ORDER BY m.due_ms, m.id LIMIT 1), (SELECT m.due_ms FROM timeline.message AS m WHERE m.topic = t.key AND died_ms = 0 AND holder != ''::bytea ORDER BY m.due_ms, m.id LIMIT 1) FROM timeline.topic AS t;

SELECT uid, name, settings, revision, created_ms FROM timeline.topic WHERE name = $1 FOR UPDATE;

SELECT uid, name, settings, revision, created_ms FROM timeline.topic;

SELECT version();

UPDATE timeline.meta SET value = value WHERE name = 'schema_version';

UPDATE timeline.topic SET settings = $1, revision = $2, created_ms = $3 WHERE uid = $4;

WITH chunk AS MATERIALIZED (
  SELECT m."row" AS place, m.bucket, m.id, m.put_ms FROM timeline.message AS m
  WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND tag != ''::bytea AND m.tag = $2 AND (m.bucket, m.id) > ($3, $4)
  ORDER BY m.bucket, m.id LIMIT $5
), done AS (
  DELETE FROM timeline.message AS m USING chunk AS f WHERE m."row" = f.place AND m.put_ms <= $6::int8 AND m.grp = $7::bytea AND m.died_ms = 0 AND ((length(m.holder) = 0 OR m.due_ms <= $8::int8) OR $9::bool) AND (m.expires_ms = 0 OR m.expires_ms > $8::int8)
  RETURNING m."row", m.id, m.birth, m.version, m.payload_sum, m.due_ms
), content AS (DELETE FROM timeline.payload WHERE "row" IN (SELECT done."row" FROM done))
SELECT l.bucket, l.id, (SELECT count(*) FROM chunk) AS met, (SELECT count(*) FROM done) AS done,
  (SELECT min(done.due_ms) FROM done) AS earliest_ms,
  ARRAY(SELECT c.id FROM chunk AS c WHERE c.put_ms <= $6::int8 EXCEPT SELECT done.id FROM done) AS others
FROM chunk AS l ORDER BY l.bucket DESC, l.id DESC LIMIT 1;

WITH chunk AS MATERIALIZED (
  SELECT m."row" AS place, m.bucket, m.id, m.put_ms FROM timeline.message AS m
  WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND tag != ''::bytea AND m.tag = $2 AND (m.bucket, m.id) > ($3, $4)
  ORDER BY m.bucket, m.id LIMIT $5
), done AS (
  DELETE FROM timeline.message AS m USING chunk AS f WHERE m."row" = f.place AND m.put_ms <= $6::int8 AND m.grp = $7::bytea AND m.died_ms = 0 AND ((length(m.holder) = 0 OR m.due_ms <= $8::int8) OR $9::bool) AND (m.expires_ms = 0 OR m.expires_ms > $8::int8)
  RETURNING m."row", m.id, m.birth, m.version, m.payload_sum, m.due_ms
), content AS (DELETE FROM timeline.payload WHERE "row" IN (SELECT done."row" FROM done)), kept AS (
  INSERT INTO timeline.remembered (topic, id, birth, version, payload_sum, last_op, settled_ms)
  SELECT $1::int8, done.id, done.birth, done.version, done.payload_sum, $10::int8, $8::int8
  FROM done
  ON CONFLICT (topic, id) DO UPDATE SET birth = excluded.birth, version = excluded.version,
    payload_sum = excluded.payload_sum, last_op = excluded.last_op, settled_ms = excluded.settled_ms
)
SELECT l.bucket, l.id, (SELECT count(*) FROM chunk) AS met, (SELECT count(*) FROM done) AS done,
  (SELECT min(done.due_ms) FROM done) AS earliest_ms,
  ARRAY(SELECT c.id FROM chunk AS c WHERE c.put_ms <= $6::int8 EXCEPT SELECT done.id FROM done) AS others
FROM chunk AS l ORDER BY l.bucket DESC, l.id DESC LIMIT 1;

WITH chunk AS MATERIALIZED (
  SELECT m."row" AS place, m.bucket, m.id, m.put_ms FROM timeline.message AS m
  WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND tag != ''::bytea AND m.tag = $2 AND (m.bucket, m.id) > ($3, $4)
  ORDER BY m.bucket, m.id LIMIT $5
), done AS (
  UPDATE timeline.message AS m SET version = m.version + 1, due_ms = CASE WHEN $10::int8 != 0 THEN $10::int8 ELSE greatest(0, m.scheduled_ms + $11::int8) END, scheduled_ms = CASE WHEN $10::int8 != 0 THEN $10::int8 ELSE greatest(0, m.scheduled_ms + $11::int8) END,
    asked_ms = $8::int8, holder = ''::bytea, last_op = $9::int8
  FROM chunk AS f WHERE m."row" = f.place AND m.put_ms <= $6::int8 AND m.grp = $7::bytea AND m.died_ms = 0 AND (length(m.holder) = 0 OR m.due_ms <= $8::int8) AND m.last_op != $9::int8 AND CASE WHEN $10::int8 != 0 THEN $10::int8 ELSE greatest(0, m.scheduled_ms + $11::int8) END <= $12::int8 AND ($11::int8 = 0 OR m.asked_ms <= $6::int8) AND (m.expires_ms = 0 OR m.expires_ms > greatest($8::int8, CASE WHEN $10::int8 != 0 THEN $10::int8 ELSE greatest(0, m.scheduled_ms + $11::int8) END)) RETURNING f.id, m.due_ms
)
SELECT l.bucket, l.id, (SELECT count(*) FROM chunk) AS met, (SELECT count(*) FROM done) AS done,
  (SELECT min(done.due_ms) FROM done) AS earliest_ms,
  ARRAY(SELECT c.id FROM chunk AS c WHERE c.put_ms <= $6::int8 EXCEPT SELECT done.id FROM done) AS others
FROM chunk AS l ORDER BY l.bucket DESC, l.id DESC LIMIT 1;

WITH chunk AS MATERIALIZED (
  SELECT m."row" AS place, m.bucket, m.id, m.put_ms FROM timeline.message AS m
  WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND tag != ''::bytea AND m.tag = $2 AND (m.bucket, m.id) > ($3, $4)
  ORDER BY m.bucket, m.id LIMIT $5
), done AS MATERIALIZED (
  SELECT f.id, m.due_ms FROM chunk AS f, timeline.message AS m WHERE m."row" = f.place AND m.put_ms <= $6::int8 AND m.grp = $7::bytea AND m.died_ms = 0 AND ((length(m.holder) = 0 OR m.due_ms <= $8::int8) OR $9::bool) AND (m.expires_ms = 0 OR m.expires_ms > $8::int8)
)
SELECT l.bucket, l.id, (SELECT count(*) FROM chunk) AS met, (SELECT count(*) FROM done) AS done,
  (SELECT min(done.due_ms) FROM done) AS earliest_ms,
  ARRAY(SELECT c.id FROM chunk AS c WHERE c.put_ms <= $6::int8 EXCEPT SELECT done.id FROM done) AS others
FROM chunk AS l ORDER BY l.bucket DESC, l.id DESC LIMIT 1;

WITH chunk AS MATERIALIZED (
  SELECT m."row" AS place, m.bucket, m.id, m.put_ms FROM timeline.message AS m
  WHERE m.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND tag != ''::bytea AND m.tag = $2 AND (m.bucket, m.id) > ($3, $4)
  ORDER BY m.bucket, m.id LIMIT $5
), done AS MATERIALIZED (
  SELECT f.id, m.due_ms FROM chunk AS f, timeline.message AS m WHERE m."row" = f.place AND m.put_ms <= $6::int8 AND m.grp = $7::bytea AND m.died_ms = 0 AND (length(m.holder) = 0 OR m.due_ms <= $8::int8) AND m.last_op != $9::int8 AND CASE WHEN $10::int8 != 0 THEN $10::int8 ELSE greatest(0, m.scheduled_ms + $11::int8) END <= $12::int8 AND ($11::int8 = 0 OR m.asked_ms <= $6::int8) AND (m.expires_ms = 0 OR m.expires_ms > greatest($8::int8, CASE WHEN $10::int8 != 0 THEN $10::int8 ELSE greatest(0, m.scheduled_ms + $11::int8) END))
)
SELECT l.bucket, l.id, (SELECT count(*) FROM chunk) AS met, (SELECT count(*) FROM done) AS done,
  (SELECT min(done.due_ms) FROM done) AS earliest_ms,
  ARRAY(SELECT c.id FROM chunk AS c WHERE c.put_ms <= $6::int8 EXCEPT SELECT done.id FROM done) AS others
FROM chunk AS l ORDER BY l.bucket DESC, l.id DESC LIMIT 1;

WITH found AS MATERIALIZED (
  SELECT f.place, a.* FROM unnest($2::int8[], $3::bytea[], $4::int8[], $5::int8[], $6::int8[], $7::int8[], $8::bool[]) WITH ORDINALITY AS a(bucket, id, birth, version, due_ms, died_ms, removed, n), LATERAL (
    SELECT x."row" AS place FROM timeline.message AS x
    WHERE x.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND x.bucket = a.bucket AND x.id = a.id) AS f
), gone AS (
  DELETE FROM timeline.message AS m USING found AS f WHERE m."row" = f.place AND m.birth = f.birth AND m.version = f.version AND m.due_ms = f.due_ms AND m.died_ms = f.died_ms AND f.removed
  RETURNING f.n, m."row", m.id, m.birth, m.version, m.payload_sum
), content AS (DELETE FROM timeline.payload WHERE "row" IN (SELECT gone."row" FROM gone)) SELECT array_agg(done.n - 1) FROM (SELECT n FROM gone) AS done;

WITH found AS MATERIALIZED (
  SELECT f.place, a.* FROM unnest($2::int8[], $3::bytea[], $4::int8[], $5::int8[], $6::int8[], $7::int8[], $8::bool[], $10::bool[], $11::int8[]) WITH ORDINALITY AS a(bucket, id, birth, version, due_ms, died_ms, removed, remembered, left_op, n), LATERAL (
    SELECT x."row" AS place FROM timeline.message AS x
    WHERE x.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND x.bucket = a.bucket AND x.id = a.id) AS f
), gone AS (
  DELETE FROM timeline.message AS m USING found AS f WHERE m."row" = f.place AND m.birth = f.birth AND m.version = f.version AND m.due_ms = f.due_ms AND m.died_ms = f.died_ms AND f.removed
  RETURNING f.n, m."row", m.id, m.birth, m.version, m.payload_sum, f.remembered, f.left_op
), content AS (DELETE FROM timeline.payload WHERE "row" IN (SELECT gone."row" FROM gone)), kept AS (
  INSERT INTO timeline.remembered (topic, id, birth, version, payload_sum, last_op, settled_ms)
  SELECT $1::int8, gone.id, gone.birth, gone.version, gone.payload_sum, gone.left_op, $9::int8
  FROM gone WHERE gone.remembered
  ON CONFLICT (topic, id) DO UPDATE SET birth = excluded.birth, version = excluded.version,
    payload_sum = excluded.payload_sum, last_op = excluded.last_op, settled_ms = excluded.settled_ms
) SELECT array_agg(done.n - 1) FROM (SELECT n FROM gone) AS done;

WITH found AS MATERIALIZED (
  SELECT f.place, a.* FROM unnest($2::int8[], $3::bytea[], $4::int8[], $5::int8[], $6::int8[], $7::int8[], $8::bool[], $9::int8[], $10::int8[], $11::int8[], $12::int8[], $13::int8[], $14::int8[], $15::int8[], $16::bytea[], $17::bytea[]) WITH ORDINALITY AS a(bucket, id, birth, version, due_ms, died_ms, removed, new_version, new_due_ms, new_scheduled_ms, new_asked_ms, new_deliveries, new_last_op, new_died_ms, new_holder, new_dead, n), LATERAL (
    SELECT x."row" AS place FROM timeline.message AS x
    WHERE x.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND x.bucket = a.bucket AND x.id = a.id) AS f
), changed AS (
  UPDATE timeline.message AS m SET version = f.new_version, due_ms = f.new_due_ms, scheduled_ms = f.new_scheduled_ms, asked_ms = f.new_asked_ms, deliveries = f.new_deliveries, last_op = f.new_last_op, died_ms = f.new_died_ms, holder = f.new_holder, dead = f.new_dead
  FROM found AS f WHERE m."row" = f.place AND m.birth = f.birth AND m.version = f.version AND m.due_ms = f.due_ms AND m.died_ms = f.died_ms AND NOT f.removed RETURNING f.n
) SELECT array_agg(done.n - 1) FROM (SELECT n FROM changed) AS done;

WITH found AS MATERIALIZED (
  SELECT f.place, a.* FROM unnest($2::int8[], $3::bytea[], $4::int8[], $5::int8[], $6::int8[], $7::int8[], $8::bytea[])
    WITH ORDINALITY AS a(bucket, id, birth, version, due_ms, until_ms, holder, n), LATERAL (
    SELECT x."row" AS place FROM timeline.message AS x
    WHERE x.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND x.bucket = a.bucket AND x.id = a.id) AS f
), leased AS (
  UPDATE timeline.message AS m SET due_ms = f.until_ms, holder = f.holder, version = m.version + 1,
    deliveries = m.deliveries + 1
  FROM found AS f WHERE m."row" = f.place AND m.birth = f.birth AND m.version = f.version
    AND m.due_ms = f.due_ms AND m.died_ms = 0
  RETURNING f.n, m."row"
)
SELECT l.n - 1, p.payload, p.headers FROM leased AS l LEFT JOIN LATERAL (
  SELECT c.payload, c.headers FROM timeline.payload AS c WHERE c."row" = l."row") AS p ON true ORDER BY l.n;

WITH found AS MATERIALIZED (SELECT f.place, a.birth, a.version, a.holder, a.n
  FROM unnest($2::int8[], $3::bytea[], $4::int8[], $5::int8[], $6::bytea[]) WITH ORDINALITY
    AS a(bucket, id, birth, version, holder, n), LATERAL (
    SELECT x."row" AS place FROM timeline.message AS x
    WHERE x.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND x.bucket = a.bucket AND x.id = a.id) AS f
  WHERE a.holder != ''::bytea
)
UPDATE timeline.message AS m SET due_ms = greatest(m.due_ms, ($7::int8[])[f.n])
FROM found AS f WHERE m."row" = f.place AND m.birth = f.birth AND m.version = f.version AND m.holder = f.holder AND m.died_ms = 0 AND (m.due_ms > $8 OR m.expires_ms = 0 OR m.expires_ms > $8)
RETURNING f.n - 1, m.due_ms;

WITH found AS MATERIALIZED (SELECT f.place, a.birth, a.version, a.holder, a.n
  FROM unnest($2::int8[], $3::bytea[], $4::int8[], $5::int8[], $6::bytea[]) WITH ORDINALITY
    AS a(bucket, id, birth, version, holder, n), LATERAL (
    SELECT x."row" AS place FROM timeline.message AS x
    WHERE x.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND x.bucket = a.bucket AND x.id = a.id) AS f
  WHERE a.holder != ''::bytea
)
UPDATE timeline.message AS m SET version = m.version + 1, holder = ''::bytea, last_op = ($8::int8[])[f.n],
  due_ms = CASE WHEN ($9::bool[])[f.n] THEN greatest(m.scheduled_ms, $10) ELSE greatest(($7::int8[])[f.n], $10) END,
  scheduled_ms = CASE WHEN ($9::bool[])[f.n] THEN m.scheduled_ms ELSE greatest(($7::int8[])[f.n], $10) END,
  asked_ms = CASE WHEN ($9::bool[])[f.n] THEN m.asked_ms ELSE $10 END,
  deliveries = CASE WHEN ($9::bool[])[f.n] THEN greatest(m.deliveries - 1, 0) ELSE m.deliveries END
FROM found AS f WHERE m."row" = f.place AND m.birth = f.birth AND m.version = f.version AND m.holder = f.holder AND m.died_ms = 0 AND m.expires_ms = 0 AND (m.last_op != ($8::int8[])[f.n] OR ($8::int8[])[f.n] = 0)
RETURNING f.n - 1, m.due_ms;

WITH found AS MATERIALIZED (SELECT f.place, a.birth, a.version, a.holder, a.n
  FROM unnest($2::int8[], $3::bytea[], $4::int8[], $5::int8[], $6::bytea[]) WITH ORDINALITY
    AS a(bucket, id, birth, version, holder, n), LATERAL (
    SELECT x."row" AS place FROM timeline.message AS x
    WHERE x.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND x.bucket = a.bucket AND x.id = a.id) AS f
  WHERE a.holder != ''::bytea
), gone AS (
  DELETE FROM timeline.message AS m USING found AS f WHERE m."row" = f.place AND m.birth = f.birth AND m.version = f.version AND m.holder = f.holder AND m.died_ms = 0
  RETURNING f.n, m."row", m.due_ms, m.id, m.birth, m.version, m.payload_sum
), content AS (DELETE FROM timeline.payload WHERE "row" IN (SELECT gone."row" FROM gone))
SELECT array_agg(gone.n - 1), array_agg(gone.due_ms) FROM gone;

WITH found AS MATERIALIZED (SELECT f.place, a.birth, a.version, a.holder, a.n
  FROM unnest($2::int8[], $3::bytea[], $4::int8[], $5::int8[], $6::bytea[]) WITH ORDINALITY
    AS a(bucket, id, birth, version, holder, n), LATERAL (
    SELECT x."row" AS place FROM timeline.message AS x
    WHERE x.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND x.bucket = a.bucket AND x.id = a.id) AS f
  WHERE a.holder != ''::bytea
), gone AS (
  DELETE FROM timeline.message AS m USING found AS f WHERE m."row" = f.place AND m.birth = f.birth AND m.version = f.version AND m.holder = f.holder AND m.died_ms = 0
  RETURNING f.n, m."row", m.due_ms, m.id, m.birth, m.version, m.payload_sum
), content AS (DELETE FROM timeline.payload WHERE "row" IN (SELECT gone."row" FROM gone)), kept AS (
  INSERT INTO timeline.remembered (topic, id, birth, version, payload_sum, last_op, settled_ms)
  SELECT $1::int8, gone.id, gone.birth, gone.version, gone.payload_sum, 0, $7::int8
  FROM gone
  ON CONFLICT (topic, id) DO UPDATE SET birth = excluded.birth, version = excluded.version,
    payload_sum = excluded.payload_sum, last_op = excluded.last_op, settled_ms = excluded.settled_ms
)
SELECT array_agg(gone.n - 1), array_agg(gone.due_ms) FROM gone;

WITH gone AS (
  DELETE FROM timeline.message WHERE "row" IN (
    SELECT m."row" FROM timeline.message AS m WHERE m.topic = $1 ORDER BY m.bucket, m.id LIMIT $2) RETURNING "row"
), content AS (DELETE FROM timeline.payload WHERE "row" IN (SELECT gone."row" FROM gone))
SELECT count(*) FROM gone;

WITH gone AS (DELETE FROM timeline.message WHERE "row" IN (
  SELECT f.place FROM unnest($2::int8[], $3::bytea[]) AS a(bucket, id), LATERAL (
    SELECT x."row" AS place FROM timeline.message AS x
    WHERE x.topic = $1 AND EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1) AND x.bucket = a.bucket AND x.id = a.id) AS f) RETURNING "row"
) DELETE FROM timeline.payload WHERE "row" IN (SELECT gone."row" FROM gone);

WITH standing AS MATERIALIZED (SELECT key FROM timeline.topic WHERE uid = $1), stored AS (
  INSERT INTO timeline.message ("row", bucket, id, birth, due_ms, expires_ms, payload_sum, payload_bytes, grp, tag, topic, headers_bytes, scheduled_ms, put_ms, asked_ms)
  SELECT a."row", a.bucket, a.id, a.birth, a.due_ms, a.expires_ms, a.payload_sum, a.payload_bytes, a.grp, a.tag, standing.key, length(a.headers), a.due_ms, $2::int8, $2::int8
  FROM standing, unnest($3::int8[], $4::int8[], $5::bytea[], $6::int8[], $7::int8[], $8::int8[], $9::int8[], $10::int8[], $11::bytea[], $12::bytea[], $14::bytea[])
    AS a("row", bucket, id, birth, due_ms, expires_ms, payload_sum, payload_bytes, grp, tag, headers)
  ON CONFLICT (topic, bucket, id) DO NOTHING RETURNING "row"
), kept AS (
  INSERT INTO timeline.payload ("row", payload, headers)
  SELECT b."row", b.payload, b.headers
  FROM unnest($3::int8[], $13::bytea[], $14::bytea[]) AS b("row", payload, headers)
  WHERE b."row" IN (SELECT stored."row" FROM stored)
)
SELECT count(*), CASE WHEN count(*) < cardinality($3) THEN array_agg(stored."row") END FROM stored;

