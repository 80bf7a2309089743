# docker build --build-arg VERSION="$(git describe --tags --always)" -t kvgate .
# docker run --rm -p 8080:8080 kvgate serve --replica http://10.0.0.1:8000

FROM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download
COPY . .
ARG VERSION=unknown
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    make build VERSION="$VERSION"

# Static: CA certificates and a user, no shell. Runs with a read-only root.
FROM gcr.io/distroless/static-debian12:nonroot
COPY --from=build /src/kvgate /kvgate
# 8080 serves clients. 9090 is the admin listener: beyond loopback it asks for admin.token_file and
# stays on the container's loopback unless KVGATE_ADMIN_LISTEN=:9090 opens it.
EXPOSE 8080 9090
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=10s CMD ["/kvgate", "healthcheck"]
ENTRYPOINT ["/kvgate"]
CMD ["serve"]
