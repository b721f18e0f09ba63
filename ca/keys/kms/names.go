//go:build awskms || gcpkms || azurekms

package kms

import (
	"crypto/rand"
	"fmt"

	"github.com/chancery-project/chancery/ca/keys"
)

// managedBy marks keys as ours, in labels and names.
const managedBy = "chancery"

// newName returns a name for a key that nobody has used.
func newName() string {
	var b [16]byte
	rand.Read(b[:])
	return fmt.Sprintf("%s-%x", managedBy, b)
}

// elsewhere is the answer to a reference that is not of this store.
func elsewhere(form string) error {
	return fmt.Errorf("%w: this store's references are %s", keys.ErrNotFound, form)
}
