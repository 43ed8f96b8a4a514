# A broker: docker build -t timeline:0.1.0 .
# Two stages: what builds packages stays behind. Runs as a user without privileges, writes to /var/lib/timeline alone.
FROM python:3.12.9-slim-bookworm AS build
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY timeline timeline
RUN python -m venv /opt/timeline \
    && /opt/timeline/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[all,otel]'

FROM python:3.12.9-slim-bookworm
RUN useradd --system --uid 10001 --home-dir /var/lib/timeline --create-home timeline
COPY --from=build /opt/timeline /opt/timeline
ENV PATH=/opt/timeline/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TIMELINE_METRICS=0.0.0.0:9001 \
    TIMELINE_LOG_FORMAT=json
USER 10001
WORKDIR /var/lib/timeline
EXPOSE 9000 9001 9080
# The broker drains on SIGTERM and ends by itself: give it more than its grace of 30 s.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "from http.client import HTTPConnection as C; c = C('127.0.0.1', 9001, timeout=2); c.request('GET', '/healthz'); exit(c.getresponse().status != 200)"]
ENTRYPOINT ["timeline"]
CMD ["serve"]
