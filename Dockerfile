# One image for all services: `python -m breakwater.services <name>`, or `breakwater …`.
FROM python:3.14-slim-bookworm AS build
RUN python -m venv /opt/build && python -m venv --without-pip /opt/breakwater
WORKDIR /src
# The packages change seldom, the code often: two layers.
COPY requirements/build.txt requirements/clouds.txt requirements/
RUN /opt/build/bin/pip install --no-cache-dir --no-deps --require-hashes -r requirements/build.txt \
 && /opt/build/bin/pip --python /opt/breakwater/bin/python install --no-cache-dir --no-deps --require-hashes -r requirements/clouds.txt
COPY pyproject.toml README.md LICENSE ./
COPY examples/breakwater.yaml examples/
COPY libs libs
COPY services services
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/wheel . \
 && /opt/build/bin/pip --python /opt/breakwater/bin/python install --no-cache-dir --no-deps --no-index /tmp/wheel/*.whl

FROM python:3.14-slim-bookworm
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin breakwater \
 && install --directory --owner breakwater --group breakwater --mode 0700 /var/lib/breakwater /var/lib/breakwater-config
COPY --from=build /opt/breakwater /opt/breakwater
ENV PATH=/opt/breakwater/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    BREAKWATER_CONFIG=/etc/breakwater/breakwater.yaml \
    BREAKWATER_LAST_GOOD_CONFIG=/var/lib/breakwater-config/last-good.yaml \
    BREAKWATER_ALIVE_FILE=/tmp/alive
WORKDIR /var/lib/breakwater
USER 10001
# Touched every 2 s by a service that is connected to NATS and whose event loop turns.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s --retries=3 \
    CMD test -n "$(find /tmp/alive -newermt '-20 seconds')"
CMD ["python", "-m", "breakwater.services"]
