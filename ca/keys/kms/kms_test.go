package kms

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

func TestParseURI(t *testing.T) {
	for in, want := range map[string]string{
		"awskms:region=eu-central-1":                                                 "awskms:region=eu-central-1",
		"awskms:region=us-gov-west-1;profile=ca;credentials-file=/etc/aws":           "awskms:credentials-file=/etc/aws;profile=ca;region=us-gov-west-1",
		"gcpkms:ring=projects/my-p/locations/global/keyRings/ca":                     "gcpkms:ring=projects/my-p/locations/global/keyRings/ca",
		"gcpkms:ring=projects/my-p/locations/europe/keyRings/a;protection-level=hsm": "gcpkms:protection-level=hsm;ring=projects/my-p/locations/europe/keyRings/a",
		"azurekms:vault=my-vault;hsm=true":                                           "azurekms:hsm=true;vault=my-vault",
		"":                                                                           "error: it should be like awskms:",
		"pkcs11:token=a":                                                             "error: it should be like awskms:",
		"cloudkms:ring=a":                                                            "error: it should be like awskms:",
		"awskms:":                                                                    `error: attribute "" is not known`,
		"awskms:profile=a":                                                           "error: region is missing",
		"awskms:region=eu-central-1;region=eu-west-1":                                `error: attribute "region" is not known, or there twice`,
		"awskms:region=eu-central-1;secret-access-key=hunter2":                       `error: attribute "secret-access-key" is not known, or there twice; awskms has credentials-file, profile, region`,
		"awskms:region=http://evil":                                                  "error: region should be a region",
		"awskms:region=eu-central-1;credentials-file=aws":                            "error: credentials-file should be an absolute path",
		"gcpkms:ring=ca":                                                             "error: ring should be projects/PROJECT",
		"gcpkms:ring=projects/my-p/locations/l/keyRings/a/b":                         "error: ring should be projects/PROJECT",
		"gcpkms:ring=projects/my-p/locations/l/keyRings/../../x":                     "error: ring should be projects/PROJECT",
		"gcpkms:ring=projects/my-p/locations/l/keyRings/a;hsm=yes":                   `error: attribute "hsm"`,
		"azurekms:vault=evil.example/x":                                              "error: vault should be the name",
		"azurekms:vault=my-vault;hsm=yes":                                            "error: hsm should be true or false",
		"azurekms:" + strings.Repeat("a", 1100):                                      "error: it should be like",
	} {
		u, err := ParseURI(in)
		got := ""
		if err != nil {
			got = "error: " + err.Error()
		} else {
			got = u.String()
		}
		if want != got && (err == nil || !strings.HasPrefix(got, want)) {
			t.Errorf("%.80s: got %s, want %s", in, got, want)
		}
		if strings.Contains(got, "hunter2") {
			t.Errorf("%s: the secret is in the error", in)
		}
	}
}

// sdks are the libraries of each tag; a build without it has none of them.
var sdks = map[string]string{
	"awskms": "github.com/aws/aws-sdk-go-v2", "gcpkms": "cloud.google.com/go/kms", "azurekms": "github.com/Azure/azure-sdk-for-go",
}

// TestDefaultBuildHasNoSDK: the clouds' libraries are in the binary with their tag, and not else.
func TestDefaultBuildHasNoSDK(t *testing.T) {
	for _, tag := range []string{"", "awskms", "gcpkms", "azurekms"} {
		out, err := exec.Command("go", "list", "-deps", "-tags", tag, "github.com/chancery-project/chancery/cmd/chancery").Output()
		if err != nil {
			t.Fatal(err)
		}
		for of, sdk := range sdks {
			if has := strings.Contains(string(out), sdk); has != (of == tag) {
				t.Errorf("tag %q: %s is in the binary: %t", tag, sdk, has)
			}
		}
	}
}

// TestEachTagBuilds: what default builds leave out compiles and passes vet.
func TestEachTagBuilds(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles the clouds' libraries: not under -short")
	}
	for tag := range sdks {
		for _, args := range [][]string{{"vet", "-tags", tag, "."}, {"build", "-tags", tag, "-o", os.DevNull, "github.com/chancery-project/chancery/cmd/chancery"}} {
			if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
				t.Errorf("go %s: %v\n%s", strings.Join(args, " "), err, out)
			}
		}
	}
}
