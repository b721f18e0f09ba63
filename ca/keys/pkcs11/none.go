//go:build !(pkcs11 && cgo)

package pkcs11

import (
	"context"
	"errors"
)

// Open says that this binary knows no tokens.
func Open(context.Context, Config) (Store, error) {
	return nil, errors.New("this binary was built without PKCS#11; build it with `CGO_ENABLED=1 go build -tags pkcs11 ./cmd/chancery`")
}
